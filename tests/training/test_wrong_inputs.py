"""Wrong inputs of training: one line, exit status 2, nothing written, no library loaded for most of them."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from training import train

ROOT = Path(train.__file__).parents[1]


@pytest.fixture
def place(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A directory with a model (without weights), data and other things that may be named."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny_model_dir / name).exists():
            shutil.copy(tiny_model_dir / name, model)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "held").mkdir()
    (tmp_path / "held/model.safetensors").touch()
    (tmp_path / "held/config.json").write_text('{"drafter_type": "ctc"}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model.safetensors").touch()
    (tmp_path / "other/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "misfit").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "misfit/model.safetensors")
    (tmp_path / "misfit/config.json").write_text('{"drafter_type": "ctc"}')
    (tmp_path / "cut.run/checkpoint").mkdir(parents=True)
    (tmp_path / "cut.run/checkpoint/state.json").write_text("{}")
    (tmp_path / "cut.run/checkpoint/state.safetensors").write_bytes(bytes(8))
    (tmp_path / "occupied.run").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "old/checkpoint").mkdir(parents=True)
    (tmp_path / "old/checkpoint/state.json").write_text("{}")
    return tmp_path


def refusal(place: Path, capsys: Any, flags: list[str]) -> str:
    """The one line that a run with these flags ends with; nothing is written."""
    before = sorted(place.rglob("*"))
    given = {"--model": "model", "--data": "data.jsonl", "--out": "out"}
    argv = [part for flag, value in given.items() if flag not in flags for part in (flag, str(place / value))]
    try:
        status = train.main([*argv, *flags])
    except SystemExit as exit_:  # of the parser
        status = int(str(exit_.code))
    assert status == 2
    assert sorted(place.rglob("*")) == before
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("train: ")
    assert captured.out == ""
    return str(line.removeprefix("train: "))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps abc", "--steps: invalid int value: 'abc'"),
        ("--step", "--steps: expected one argument"),
        ("--nonsense 3", "unrecognized arguments: --nonsense 3"),
        ("--data", "--data: expected at least one argument"),
        ("--resume --overwrite", "--resume and --overwrite exclude each other"),
        ("--preset best", "--preset: must be one of ctc, paper, medusa, "),
        ("--preset eagle --drafter-type ctc", "--drafter-type: the preset eagle is a eagle head, got 'ctc'"),
        ("--preset hydra --transition mlp", "--transition: must be 'none' for hydra"),
        ("--model-dtype fp8", "--model-dtype: must be one of auto, fp32, bf16, got 'fp8'"),
        ("--device-map cuda", "--device-map: must be one of auto, balanced, balanced_low_0, sequential, got"),
        (
            "--drafter-type streaming --model-dtype bf16",
            "--model-dtype: streams are trained in float32 layers of the model, got 'bf16'",
        ),
        (
            "--drafter-type streaming --device-map auto",
            "--device-map: streams need the model's layers on one device, got 'auto'",
        ),
        ("--batch-size 0", "--batch-size: must be at least 1, got 0"),
        ("--warmup -1", "--warmup: must be at least 0, got -1"),
        ("--weight-decay -0.1", "--weight-decay: must be at least 0, got -0.1"),
        ("--max-grad-norm -1", "--max-grad-norm: must be more than 0, got -1.0"),
        ("--data-seed -1", "--data-seed: must be between 0 and 4294967295, got -1"),
        ("--self-prompts 2 --prompt-top-p 0", "--prompt-top-p: must be between 0.001 and 1, got 0.0"),
        ("--max-length 2", "--max-length: must be at least 3, got 2"),
        ("--max-samples 0", "--max-samples: must be at least 1, got 0"),
        ("--learning-rate 2", "--learning-rate: must be more than 0 and less than 1, got 2.0"),
        ("--learning-rate nan", "--learning-rate: must be more than 0 and less than 1, got nan"),
        ("--holdout 0", "--holdout: must be more than 0 and less than 1, got 0.0"),
        ("--out /", "--out: expected a directory with a name, got '/'"),
        ("--seed 4294967296", "--seed: must be between 0 and 4294967295, got 4294967296"),
        ("--out {place}/text.txt", "--out: {place}/text.txt is a file; expected a directory"),
        ("--out {place}/text.txt/a", "--out: {place}/text.txt is a file; expected a directory"),
        ("--out {place}/old", "--out: {place}/old/checkpoint is where an earlier release kept a run's"),
        ("--out {place}/occupied", "--out: {place}/occupied.run is a file; expected a directory"),
        ("--out {place}/held", "--out: {place}/held holds a finished head; add --resume to go on or"),
        ("--out {place}", "--out: {place} is not empty and holds no draft head"),
        ("--out {place}/model --overwrite", "--out: {place}/model is not empty and holds no draft head"),
        ("--out {place}/held --resume", "--resume: {place}/held holds a finished head and no checkpoint;"),
        (
            "--model {place}/absent",
            "--model: {place}/absent has no config.json; expected a Hugging Face model",
        ),
        ("--model {place}/empty", "--model: {place}/empty has no config.json; expected a Hugging Face model"),
        ("--model {place}/text.txt", "--model: {place}/text.txt is a file; expected a Hugging Face model"),
        ("--data {place}/absent.jsonl", "--data: {place}/absent.jsonl does not exist"),
        ("--data {place}/empty", "--data: {place}/empty cannot be read: Is a directory"),
        ("--data {place}/text.txt", "{place}/text.txt:1: expected a JSON object, got 'hello'"),
        ("--data {place}/absent.parquet", "--data: {place}/absent.parquet does not exist"),
        ("--init-from {place}/empty", "--init-from: {place}/empty holds no model.safetensors; expected"),
        (
            "--init-from {place}/other",
            "--init-from: {place}/other/config.json is no draft head's; expected a dra",
        ),
        ("--out {place}/cut --resume", "--resume: {place}/cut.run/checkpoint is damaged ("),
        ("--cache-dir {place}/text.txt", "--cache-dir: {place}/text.txt is a file; expected a directory"),
        ("--heads {place}/text.txt", "--heads: {place}/text.txt is not valid TOML"),
        ("--heads {place}/empty", "--heads: {place}/empty cannot be read: Is a directory"),
        # From here on the configuration and the tokenizer are loaded.
        ("--target-layer-ids 7", "--target-layer-ids: must be distinct, ascending decoder layers below 2"),
        ("--init-from {place}/misfit", "--init-from: no weight of {place}/misfit fits this head"),
        ("--num-candidates 300", "--num-candidates: must be at most vocab_size 258"),
        ("--max-length 3", "--max-length: every prompt is longer than 1 tokens"),
        ("--max-samples 1", "--data: no sequence with a continuation is left for training; at least two"),
    ],
)
def test_flags(place: Path, capsys: Any, flags: str, message: str) -> None:
    given = [flag.format(place=place) for flag in flags.split()]
    assert refusal(place, capsys, given).startswith(message.format(place=place))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            '{"prompt": "hi"}',
            "--data: no row can be used; the first bad row: {place}/data.jsonl:1: no; got 'h",
        ),
        ('{"text": "x"}', "--data: every prompt is empty, or a text of one token, which nothing continues"),
    ],
)
def test_where_no_prompt_is_left(place: Path, capsys: Any, row: str, message: str) -> None:
    (place / "model/chat_template.jinja").write_text("{{ raise_exception('no') }}")
    (place / "data.jsonl").write_text(f"{row}\n" * 3)
    assert refusal(place, capsys, ["--skip-bad-rows"]).startswith(message.format(place=place))


def test_a_spread_model_has_one_process(place: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``accelerate launch`` and ``torchrun`` say in this variable how many processes there are."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refusal(place, capsys, ["--device-map", "auto"])
    assert line.startswith(
        "--device-map: one process spreads the model over all devices, and 2 were started;"
    )


def test_what_is_required(capsys: Any) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(["--model", "m"])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: the following arguments are required: --out (see ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "hi"}\n{"prompt": ', r"{path}:2: expected a JSON object, got '{\"prompt\": '"),
        (b'{"prompt": "hi"}\n{"promt": "x"}\n', "{path}:2: expected a field conversations, messages, "),
        (b'{"prompt": 3}\n', "{path}:1: field 'prompt': expected text, got int"),
        (b"[1, 2", "{path} is not valid JSON: "),
        (b"\xff\xfe", "--data: {path} is not UTF-8 (byte 0)"),
        (b"", "--data: {path} holds no prompt"),
    ],
)
def test_data(place: Path, capsys: Any, content: bytes, message: str) -> None:
    path = place / "bad.jsonl"
    path.write_bytes(content)
    line = refusal(place, capsys, ["--data", str(path)])
    assert line.startswith(message.replace("{path}", str(path)).replace("\\", ""))


def edited(place: Path, **settings: Any) -> None:
    path = place / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda place: edited(place, model_type="gpt2"),
            "--model: model_type: must be one of llama, mistral",
        ),
        (lambda place: edited(place, model_type=None), "expected an object with the field 'model_type'"),
        (lambda place: cut(place / "model/config.json"), "config.json cannot be read as JSON"),
        (
            lambda place: edited(place, quantization_config={"quant_method": "bitsandbytes"}),
            "--model: quantization_config.quant_method: must be one of gptq, awq",
        ),
        (
            lambda place: edited(
                place, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "--model: rope_type: must be one of default, linear",
        ),
        (lambda place: cut(place / "model/tokenizer.json"), "--model: {place}/model: "),
        (lambda place: None, "--model: {place}/model: "),
        (
            lambda place: (place / "model/model.safetensors").write_bytes(b"x" * 50),
            "--model: {place}/model/model.safetensors is no safetensors file",
        ),
        (
            lambda place: (place / "model/chat_template.jinja").write_text("{{ raise_exception('no') }}"),
            "{place}/data.jsonl:1: no; got 'a'",
        ),
    ],
    ids=["gpt2", "typeless", "config", "quantised", "rope", "tokenizer", "no weights", "weights", "template"],
)
def test_models(place: Path, capsys: Any, change: Callable[[Path], Any], message: str) -> None:
    change(place)
    assert message.format(place=place) in refusal(place, capsys, [])


def test_no_library_is_loaded_for_what_needs_none(place: Path) -> None:
    """A wrong path, type or row is found before torch and Transformers are imported."""
    (place / "bad.jsonl").write_text('{"prompt": "hi"}\n{}\n')
    flags = ["--model", str(place / "model"), "--data", str(place / "bad.jsonl"), "--out", str(place / "out")]
    script = (
        "import sys; from training import train; print(train.main(sys.argv[1:]), "
        "sorted({'torch', 'transformers', 'accelerate', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *flags], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 []\n"
    assert "bad.jsonl:2: expected a field" in done.stderr
