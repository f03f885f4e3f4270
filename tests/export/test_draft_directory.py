"""What every target that writes a draft directory refuses, in one line that names the option."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from drafters import base
from drafters.base import Drafter
from export.build_engines import main


@pytest.mark.parametrize(
    ("target", "settings", "options", "message"),
    [
        ("vllm", {"drafter_type": "medusa"}, [], "drafter_type: expected ctc or block, got 'medusa'"),
        ("vllm", {"drafter_type": "eagle"}, [], "drafter_type: expected ctc or block, got 'eagle'"),
        (
            "vllm",
            {"trunk": "residual"},
            [],
            "trunk: expected 'attention', which reads the whole context, got",
        ),
        ("vllm", {}, ["--precision", "int4"], "--precision: is for engines"),
        ("vllm", {}, ["--gpu", "sm89"], "--gpu: is for engines"),
        ("vllm", {}, ["--max-context", "64"], "--max-context: is for engines"),
        ("vllm", {}, ["--top-k", "0"], "--top-k: must be between 1 and"),
        (
            "vllm",
            {"num_frames": 1},
            [],
            "num_frames: expected at least 2, for the anchor and one draft, got 1",
        ),
        ("vllm", {"base_num_layers": 3}, [], "base_num_layers must be the model's 2, got 3"),
        ("vllm", {}, ["--num-nodes", "4"], "--num-nodes: is for --target sglang; vLLM verifies a chain"),
        ("onnxruntime", {}, ["--num-nodes", "4"], "--num-nodes: is for --target sglang; a bundle is told"),
        ("sglang", {"drafter_type": "hydra"}, [], "drafter_type: expected ctc or block, got 'hydra'"),
        (
            "sglang",
            {"num_frames": 1},
            [],
            "num_frames: expected at least 2, for the anchor and one draft, got 1",
        ),
        ("sglang", {}, ["--step-nodes", "8"], "--step-nodes: is for engines; SGLang loads the model itself"),
        ("sglang", {}, ["--max-context", "64"], "--max-context: is for engines; SGLang has --context-length"),
        (
            "edge-llm",
            {"attention_window": 24},
            [],
            "attention_window: expected none, because attention over blocks has none in TensorRT Edge-LLM",
        ),
        (
            "edge-llm",
            {"num_frames": 1},
            [],
            "num_frames: expected at least 2, for the anchor and one draft, got 1",
        ),
        ("edge-llm", {"drafter_type": "eagle"}, [], "drafter_type: expected ctc or block, got 'eagle'"),
        ("tensorrt-llm", {"drafter_type": "medusa"}, [], "drafter_type: expected ctc or block, got 'medusa'"),
        (
            "tensorrt-llm",
            {"trunk": "residual"},
            [],
            "trunk: expected 'attention', which reads the whole context, got",
        ),
        (
            "tensorrt-llm",
            {},
            ["--step-nodes", "8"],
            "--step-nodes: is for engines; TensorRT-LLM loads the model itself",
        ),
        ("tensorrt-llm", {}, ["--max-context", "513"], "--max-context: must be between 1 and 512, got 513"),
        ("tensorrt-llm", {"base_num_layers": 3}, [], "base_num_layers must be the model's 2, got 3"),
    ],
)
def test_one_line_and_nothing_written(
    tiny_model_dir: Path,
    make_tiny_head: Callable[..., Drafter],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: str,
    settings: dict[str, Any],
    options: list[str],
    message: str,
) -> None:
    make_tiny_head(**settings).save_pretrained(tmp_path / "head")
    command = ["--model", str(tiny_model_dir), "--drafter", str(tmp_path / "head"), "--target", target]
    assert main([*command, "--out", str(tmp_path / "draft"), *options]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("build_engines: --")
    assert message in last
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_full_disk_is_one_line(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(base, "save_file", full)
    command = ["--model", str(tiny_model_dir), "--drafter", str(tiny_drafter_dir), "--target", "vllm"]
    assert main([*command, "--out", str(tmp_path / "draft")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"build_engines: --out: {tmp_path / 'draft'} cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())
