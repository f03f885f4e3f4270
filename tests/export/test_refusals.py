"""What the exporter refuses, and what it says."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from drafters.build import build_drafter
from drafters.config import DrafterConfig
from drafters.target_models import weights_digest
from export.build_engines import main
from export.errors import ExportError
from export.options import Options
from export.source import load_source, save_tokenizer
from export.targets import check_head_options, resolve, with_head_precision
from tests.stream_heads import load_model, make_stream_head


@pytest.fixture
def edited(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model with other settings in its config.json."""

    def edit(**settings: Any) -> Path:
        directory = tmp_path / "edited"
        shutil.copytree(tiny_model_dir, directory)
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **settings}))
        return directory

    return edit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gpt2"}, r"--model: model_type: must be one of llama, .* got 'gpt2'"),
        ({"model_type": "no-such-type"}, r"--model: model_type: must be one of llama, .* got 'no-such-type'"),
        ({"vocab_size": 200}, r"the tokenizer has 258 tokens, more than the model's vocab_size of 200"),
    ],
)
def test_configuration(edited: Callable[..., Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_source(edited(**settings), None)


def test_an_added_token_beyond_the_vocabulary_is_left_out(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Gemma 3's text models have no embedding for the image token of their tokenizer."""
    source = load_source(tiny_model_dir, None)
    before = source.tokenizer.backend_tokenizer.get_vocab()
    source.tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert source.tokenizer.convert_tokens_to_ids("<image>") == 258 == source.spec.vocab_size
    source.tokenizer.save_pretrained(tmp_path)
    shutil.copy(tiny_model_dir / "config.json", tmp_path)
    shutil.copy(tiny_model_dir / "model.safetensors", tmp_path)
    save_tokenizer(load_source(tmp_path, None), tmp_path)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert written.get_vocab() == before
    assert all(token < 258 for token in written.encode("a<image>b").ids)


def test_the_name_of_a_model_is_that_of_its_directory(tiny_model_dir: Path, tmp_path: Path) -> None:
    inside = shutil.copytree(tiny_model_dir, tmp_path / "chat-model") / "inside"
    inside.mkdir()
    assert load_source(inside / "..", None).spec.name == "chat-model"


def test_a_tokenizer_of_batches_cuts_and_pads_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Fine-tuned models are often saved with the truncation and the padding of their training."""
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    save_tokenizer(load_source(directory, None), tmp_path)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [len(written.encode("a" * count).ids) for count in (2, 6)] == [2, 6]


@pytest.mark.parametrize("context", [0, -1, 513])
def test_max_context_out_of_range(tiny_model_dir: Path, context: int) -> None:
    with pytest.raises(ExportError, match=rf"--max-context: must be between 1 and 512, got {context}"):
        load_source(tiny_model_dir, None, max_context=context)


def test_incomplete_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"has no config.json"):
        load_source(tmp_path / "absent", None)
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ExportError, match=r"config\.json"):
        load_source(directory, None)
    shutil.copy(tiny_model_dir / "config.json", directory)
    with pytest.raises(ExportError, match="tokenizer"):
        load_source(directory, None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model_dir / name, directory)
    with pytest.raises(ExportError, match=r"weights in .* cannot be loaded"):
        load_source(directory, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size must be the model's 64, got 32; .* another target model"),
        ({"vocab_size": 300}, "vocab_size must be the model's 258, got 300"),
        ({"base_num_layers": 3}, "base_num_layers must be the model's 2, got 3"),
    ],
)
def test_drafter_of_another_target_model(
    tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    values = {**DrafterConfig.load(tiny_drafter_dir).to_dict(), **change}
    build_drafter(DrafterConfig.from_dict(values)).save_pretrained(tmp_path / "head")
    with pytest.raises(ExportError, match=f"--drafter: {message}"):
        load_source(tiny_model_dir, tmp_path / "head")


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (
            {"base_weights": "0" * 16},
            "base_weights must be the target model's [0-9a-f]{16}, got 0{16}; the head was trained for a "
            "model of other weights, 'model'; --force exports it nevertheless",
        ),
        (
            {"base_weights": "", "base_model": "some/other"},
            "base_model must be the target model's name 'model', got 'some/other'; .*; --force exports it",
        ),
    ],
)
def test_a_head_of_other_weights(
    tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path, recorded: dict[str, str], message: str
) -> None:
    directory = shutil.copytree(tiny_drafter_dir, tmp_path / "head")
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**values, **recorded}), encoding="utf-8")
    with pytest.raises(ExportError, match=f"^--drafter: {message}"):
        load_source(tiny_model_dir, directory)
    assert load_source(tiny_model_dir, directory, any_base=True).drafter is not None


@pytest.mark.parametrize("name", ["model", "other"])
def test_a_digest_says_more_than_a_name(
    tiny_model_dir: Path, tiny_drafter_dir: Path, name: str, tmp_path: Path
) -> None:
    """A head that has the digest of its model is taken wherever the model lies."""
    directory = shutil.copytree(tiny_drafter_dir, tmp_path / "head")
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    digest = weights_digest(load_source(tiny_model_dir, None).model)
    recorded = {"base_weights": digest, "base_model": name}
    (directory / "config.json").write_text(json.dumps({**values, **recorded}), encoding="utf-8")
    assert load_source(tiny_model_dir, directory).drafter is not None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ messages[0].content }} -- again: {{ messages[0].content }}",
            "the template renders the user's message 2 times; expected it once, because",
        ),
        ("{{ messages[0].content | upper }}", "does not hold the user's message unchanged"),
        ("{{ raise_exception('a system message is needed') }}", "a system message is needed"),
    ],
)
def test_templates_that_are_no_prefix_and_suffix(
    tiny_model_dir: Path, tmp_path: Path, template: str, message: str
) -> None:
    """Refused before the weights are read: there are none."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory, ignore=lambda *_: ["model.safetensors"])
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(ExportError, match=f"^chat_template: .*{message}") as caught:
        load_source(directory, None)
    assert "\n" not in str(caught.value)


def test_drafter_of_an_unknown_type(tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_drafter_dir, tmp_path / "head")
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**values, "drafter_type": "gru"}), encoding="utf-8")
    with pytest.raises(
        ExportError, match=r"--drafter: .*config\.json: drafter_type must be one of ctc, .*'gru'"
    ):
        load_source(tiny_model_dir, directory)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--step-nodes 4,8",
            "--step-nodes: streams of the verify pass run in steps on the host, a device has steps of 0 "
            "nodes, got 4; --stream-pass own makes steps for devices",
        ),
        (
            "--stream-pass own --kept-nodes 4",
            "--kept-nodes: is for streams in the verify pass only, got a head of streams with --stream-pass "
            "own",
        ),
        ("--kept-nodes 0", "--kept-nodes: must be between 1 and 256, got 0"),
        ("--top-k 300", "--top-k: must be between 1 and 258 for this head, got 300"),
        (
            "--drafter-precision int8",
            "--drafter-precision: streams run through the target model's layers, which have the precision "
            "fp32, got int8",
        ),
    ],
)
def test_options_of_streams(
    tiny_model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    message: str,
) -> None:
    head = make_stream_head(load_model(tiny_model_dir), drafter_type="streaming")
    head.save_pretrained(tmp_path / "head")
    arguments = ["--model", tiny_model_dir, "--drafter", tmp_path / "head", "--out", tmp_path / "out"]
    assert main([*map(str, arguments), *flags.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"build_engines: {message}"
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_drafter_that_is_none(tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"--drafter: .* is no drafter checkpoint"):
        load_source(tiny_model_dir, tmp_path)
    shutil.copy(tiny_drafter_dir / "config.json", tmp_path)
    with pytest.raises(ExportError, match=r"--drafter: .*model\.safetensors is missing"):
        load_source(tiny_model_dir, tmp_path)


def test_a_head_is_int4_unless_told(tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> None:
    """Streams have the target model's precision."""
    make_stream_head(load_model(tiny_model_dir), drafter_type="streaming").save_pretrained(tmp_path)
    for drafter, options, expected in (
        (tiny_drafter_dir, Options(), "int4"),
        (tiny_drafter_dir, Options("int8"), "int4"),
        (tiny_drafter_dir, Options(drafter_precision="fp32"), "fp32"),
        (tiny_drafter_dir, Options("fp16"), "int4"),
        (tmp_path, Options(), None),
        (tmp_path / "absent", Options(), None),
        (None, Options(), None),
    ):
        assert with_head_precision(options, drafter).drafter_precision == expected


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "auto",
            Options(gpus=("sm89",)),
            r"--gpu: is for --target tensorrt-rtx or tensorrt, got auto, which is o",
        ),
        (
            "onnxruntime",
            Options(max_batch=4),
            "--max-batch: is for --target tensorrt-rtx or .*, got onnxruntime",
        ),
        ("torch", Options(gpu_memory=8), "--gpu-memory: is for --target tensorrt-rtx or tensorrt, got torch"),
        ("onnxruntime", Options(activations="fp16"), "--activations: is for --target .* or torch, got onnx"),
        (
            "tensorrt",
            Options("int8", int8_scales="blocks"),
            "--int8-scales: is for --target onnxruntime, got",
        ),
        ("auto", Options(int8_scales="blocks"), "--int8-scales: is for --precision int8, got fp32"),
        (
            "auto",
            Options("int8", int4_block_size=128),
            "--int4-block-size: is for --precision int4, got int8",
        ),
        (
            "auto",
            Options(calibration_text=Path("t")),
            "--calibration-text: is for --precision int8 or int4, got",
        ),
        (
            "auto",
            Options("int8", int8_scales="blocks", float_products=True),
            "--int8-scales: is for products in int8, which --float-products turns off",
        ),
        (
            "auto",
            Options("int8", calibration_text=Path("t"), attention="fused"),
            "--calibration-text: is for products in int8, which --attention fused turns off",
        ),
        (
            "tensorrt",
            Options("int8", calibration_text=Path("t")),
            "--calibration-text: is for products in int8, which tensorrt has not",
        ),
        (
            "torch",
            Options("bf16", activations="fp16"),
            "--activations: is for the precisions int8, int4, fp8, got bf16",
        ),
        (
            "auto",
            Options(quality_text=Path("t")),
            "--quality-text: is for --precision int8 or int4 or fp8, got",
        ),
        ("auto", Options(float_products=True), "--float-products: is for --precision int8 or int4, got fp32"),
        (
            "torch",
            Options("bf16", lm_head="float"),
            "--lm-head: is for --precision int8 or int4 or fp8",
        ),
        (
            "torch",
            Options("int4", lm_head="int8"),
            "--lm-head: int8 is for --precision int4 and --target onnxruntime, got int4 and torch",
        ),
        (
            "auto",
            Options("int8", lm_head="int8"),
            "--lm-head: int8 is for --precision int4 and .*, got int8 and auto, which is onnxruntime",
        ),
    ],
)
def test_an_option_that_would_do_nothing(name: str, options: Options, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        resolve(name, options)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("onnxruntime", {}),
        ("onnxruntime", {"float_products": True}),
        ("onnxruntime", {"attention": "fused"}),
        ("tensorrt", {}),
        ("torch", {}),
    ],
)
def test_every_target_rounds_int4_by_a_text(name: str, more: dict[str, Any]) -> None:
    assert resolve(name, Options("int4", calibration_text=Path("t"), **more)).name == name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--top-k 3", "--top-k: is for a draft head, got no --drafter"),
        ("--drafter-precision int8", "--drafter-precision: is for a draft head, got no --drafter"),
        ("--stream-pass own", "--stream-pass: is for a draft head, got no --drafter"),
        ("--kept-nodes 0", "--kept-nodes: is for a draft head, got no --drafter"),
        ("--force", "--force: is for a draft head, got no --drafter"),
        (
            "--drafter HEAD --kept-nodes 4",
            "--kept-nodes: is for streams in the verify pass only, got a ctc head",
        ),
        ("--drafter HEAD --stream-pass own", "--stream-pass: is for streams only, got a ctc head"),
        ("--drafter HEAD --beam-width 2", "--beam-width: is for hydra and eagle heads, got a ctc head"),
        (
            "--drafter HEAD --min-level-probability 7",
            "--min-level-probability: is for hydra and eagle heads, got a ctc head",
        ),
    ],
)
def test_an_option_that_the_head_does_not_read(
    flags: str,
    message: str,
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", str(tiny_model_dir), "--out", str(tmp_path / "out")]
    assert main([*arguments, *flags.replace("HEAD", str(tiny_drafter_dir)).split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"build_engines: {message}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(top_k=0), "--top-k: must be between 1 and 258 for this head, got 0"),
        (Options(kept_nodes=4), "--kept-nodes: is for streams in the verify pass only, got a ctc head"),
        (Options(stream_pass="own"), "--stream-pass: is for streams only, got a ctc head"),
    ],
)
def test_what_does_not_fit_a_head_is_known_before_any_weights(
    tiny_drafter_dir: Path, tmp_path: Path, options: Options, message: str
) -> None:
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(tiny_drafter_dir / "config.json", head)
    with pytest.raises(ExportError, match=f"^{re.escape(message)}$"):
        check_head_options(options, head)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp8"])
def test_auto_does_not_choose_gpus(precision: str) -> None:
    with pytest.raises(ExportError, match=r"^--target: must be one of tensorrt-rtx with --gpu, .* got auto"):
        resolve("auto", Options(precision))
    assert resolve("auto", Options(precision, gpus=("sm89",))).name == "tensorrt-rtx"


def test_target_and_precision() -> None:
    assert resolve("auto", Options(quality_text=Path("t"), quantize_embedding=True)).name == "onnxruntime"
    for precision in ("fp32", "int8", "int4"):
        assert resolve("auto", Options(precision, drafter_precision=precision)).name == "onnxruntime"
    with pytest.raises(ExportError, match=r"--target: must be auto or one of onnxruntime.*, got 'magic'"):
        resolve("magic", Options())
    with pytest.raises(ExportError, match="--precision: onnxruntime supports fp32, int8, int4, got 'fp16'"):
        resolve("onnxruntime", Options("fp16"))
    with pytest.raises(ExportError, match=r"--drafter-precision: onnxruntime supports .*, got 'fp8'"):
        resolve("onnxruntime", Options(drafter_precision="fp8"))
    with pytest.raises(ExportError, match="int3"):
        resolve("auto", Options("int3"))


@pytest.mark.parametrize("width", ["0", "259"])
def test_width_of_the_lattice(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    width: str,
) -> None:
    out = tmp_path / "out"
    arguments = ["--model", tiny_model_dir, "--drafter", tiny_drafter_dir, "--out", out]
    assert main([*map(str, arguments), "--top-k", width]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message == f"build_engines: --top-k: must be between 1 and 258 for this head, got {width}"
    assert list(tmp_path.iterdir()) == []


def test_out_that_must_not_be_replaced(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    for out, message in ((tmp_path, "is no engine bundle"), (tmp_path / "thesis.txt", "is a file")):
        assert main(["--model", str(tiny_model_dir), "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_script_fails_with_one_line(tmp_path: Path) -> None:
    """As users start it: ``export/`` is then first on sys.path."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "export/build_engines.py", "--model", tmp_path / "absent", "--out", tmp_path / "b"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert errors == [
        f"build_engines: --model: {tmp_path / 'absent'} has no config.json; "
        "expected a Hugging Face model directory, OWNER/NAME of one on the hub, or a GGUF file"
    ]
    assert list(tmp_path.iterdir()) == []
