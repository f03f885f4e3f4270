"""Wrong inputs of an export: one line, exit status 2, nothing written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.build_engines import build, main
from export.errors import ExportError
from runtime.core.system import available_cores


@pytest.fixture
def place(tiny_model_dir: Path, tiny_drafter_dir: Path, tmp_path: Path) -> Path:
    """A directory with a model, its head and other things that may be named."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    shutil.copytree(tiny_drafter_dir, tmp_path / "head")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    return tmp_path


def refusal(place: Path, capsys: Any, flags: list[str]) -> str:
    """The one line, besides those of the progress, that a build with these flags ends with."""
    before = sorted(place.rglob("*"))
    given = {"--model": "model", "--drafter": "head", "--out": "out"}
    argv = [part for flag, value in given.items() if flag not in flags for part in (flag, str(place / value))]
    assert main([*argv, *flags]) == 2
    assert sorted(place.rglob("*")) == before
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    (line,) = lines
    return str(line.removeprefix("build_engines: "))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--model {place}/absent",
            "--model: {place}/absent has no config.json; expected a Hugging Face model",
        ),
        ("--model {place}/empty", "--model: {place}/empty has no config.json; expected a Hugging Face model"),
        (
            "--model {place}/model.gguf",
            "--model: {place}/model.gguf is cut short or damaged; copy it again",
        ),
        (
            "--drafter {place}/absent",
            "--drafter: {place}/absent has no config.json; expected the directory",
        ),
        (
            "--drafter {place}/model",
            "--drafter: {place}/model is a model; expected the directory of a draft head",
        ),
        ("--out {place}/empty/../model.gguf", "--out: {place}/empty/../model.gguf is a file"),
        ("--out /", "--out: / is a mount point, which cannot be replaced; name a directory in it"),
        ("--target magic", "--target: must be auto or one of onnxruntime, "),
        (
            "--target onnxruntime --precision fp16",
            "--precision: onnxruntime supports fp32, int8, int4, got 'fp16'",
        ),
        ("--max-context 0", "--max-context: must be between 1 and 512, got 0"),
    ],
)
def test_flags(place: Path, capsys: Any, flags: str, message: str) -> None:
    given = [flag.format(place=place) for flag in flags.split()]
    assert refusal(place, capsys, given).startswith(message.format(place=place))


def test_a_system_that_does_not_say_which_cores_a_process_may_use(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cores() == 3
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "--drafter" in capsys.readouterr().out


def edited(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def reweighted(model: Path, removed: str = "", added: str = "") -> None:
    """A model's weights without one, or with another one."""
    weights = load_file(model / "model.safetensors")
    weights.pop(removed, None)
    if added:
        weights[added] = torch.ones(64)
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda place: edited(place / "model/config.json", model_type="gpt2"),
            "--model: model_type: must be one of",
        ),
        (lambda place: cut(place / "model/config.json"), "config.json cannot be read as JSON"),
        (
            lambda place: edited(
                place / "model/config.json", quantization_config={"quant_method": "bitsandbytes"}
            ),
            "--model: quantization_config.quant_method: must be one of gptq, awq, ",
        ),
        (lambda place: (place / "model/tokenizer.json").unlink(), "--model: {place}/model has no "),
        (
            lambda place: cut(place / "model/model.safetensors"),
            "--model: {place}/model/model.safetensors has 100 bytes and must have",
        ),
        (
            lambda place: (place / "model/model.safetensors").unlink(),
            "--model: the weights in {place}/model cannot",
        ),
        (
            lambda place: edited(place / "model/config.json", quantization_config="gptq"),
            "--model: quantization_config: expected an object, got 'gptq'",
        ),
        (
            lambda place: reweighted(place / "model", "model.layers.1.mlp.up_proj.weight"),
            "--model: {place}/model: model.layers.1.mlp.up_proj.weight: expected this weight, got none",
        ),
        (
            lambda place: reweighted(place / "model", added="model.layers.0.self_attn.q_proj.bias"),
            "--model: {place}/model: model.layers.0.self_attn.q_proj.bias: the model has no such weight",
        ),
        (
            lambda place: edited(place / "model/config.json", attention_bias=True),
            "model.layers.0.self_attn.k_proj.bias: expected this weight, got none",
        ),
        (
            lambda place: edited(place / "model/config.json", intermediate_size=96),
            "model.layers.0.mlp.down_proj.weight",
        ),
        (
            lambda place: edited(place / "model/config.json", max_position_embeddings=0),
            "max_position_embeddings: must be above 0, got 0",
        ),
        (
            lambda place: (place / "model/generation_config.json").write_text('{"eos_token_id": [0, 5'),
            "generation_config.json cannot be read as JSON",
        ),
        (
            lambda place: (place / "model/generation_config.json").write_text('{"eos_token_id": [0, "5"]}'),
            "eos_token_id: expected a token's number or several, got [0, '5']",
        ),
        (
            lambda place: (place / "model/generation_config.json").write_text('{"eos_token_id": 90000}'),
            "--model: eos_token_id: must be below the vocab_size of ",
        ),
        (
            lambda place: cut(place / "head/model.safetensors"),
            "--drafter: {place}/head/model.safetensors has 100 bytes and must have",
        ),
        (
            lambda place: edited(place / "head/config.json", num_frames=0),
            "num_frames must be at least 1, got 0",
        ),
        (
            lambda place: edited(place / "head/config.json", base_weights="0"),
            "base_weights must be the target model's",
        ),
        (
            lambda place: (place / "model/chat_template.jinja").write_text("{{ messages }}{{ messages }}"),
            "chat_template: the template renders the user's message 2 times",
        ),
    ],
    ids=[
        "gpt2",
        "config",
        "quantised",
        "tokenizer",
        "cut",
        "no weights",
        "settings of quantisation",
        "missing weight",
        "surplus weight",
        "biases",
        "shapes",
        "context",
        "generation",
        "end as text",
        "end outside",
        "head",
        "frames",
        "base",
        "template",
    ],
)
def test_files(place: Path, capsys: Any, change: Callable[[Path], Any], message: str) -> None:
    change(place)
    assert message.format(place=place) in refusal(place, capsys, [])


def test_out_must_not_hold_what_is_read(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was written earlier is replaced as a whole, with all that was put there since."""
    out = place / "bundle"
    for name in ("model", "head"):
        shutil.copytree(place / name, out / name)
    for name in ("bundle.json", "prose.txt"):
        (out / name).write_text("{}")
    for flag, name in (
        ("--model", "model"),
        ("--drafter", "head"),
        ("--quality-text", "prose.txt"),
        ("--calibration-text", "prose.txt"),
        ("--timing-cache", "absent"),
    ):
        precision = ["--precision", "int8"] if flag != "--timing-cache" else ["--target", "tensorrt"]
        given = [flag, str(out / name), "--out", str(out), *precision]
        assert f"--out: {out} would be replaced, and {flag} " in refusal(place, capsys, given)


def test_out_must_not_hold_the_model_of_a_build_from_python(place: Path) -> None:
    shutil.copytree(place / "model", place / "bundle/model")
    (place / "bundle/bundle.json").write_text("{}")
    with pytest.raises(ExportError, match="bundle would be replaced, and --model "):
        build(place / "bundle/model", place / "bundle")
