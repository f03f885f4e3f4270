"""The draft directory for SGLang, and one line for what cannot be written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafters.base import Drafter
from export.build_engines import main
from integrations.draft_directory import DraftSettings

Make = Callable[..., Drafter]


def build(model: Path, head: Path, out: Path, *options: str) -> int:
    command = ["--model", str(model), "--drafter", str(head), "--target", "sglang", "--out", str(out)]
    return main([*command, *options])


def test_the_directory(
    tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_tiny_head("ctc", frame_start="fused")
    head.save_pretrained(tmp_path / "head")
    out = tmp_path / "draft"
    assert build(tiny_model_dir, tmp_path / "head", out) == 0
    assert set(load_file(out / "model.safetensors")) == set(head.state_dict())
    config = json.loads((out / "config.json").read_text())
    assert DraftSettings.read(type("Config", (), config), str(out)).head == head.config
    assert config["block_size"] == 4  # the head's frames
    record = json.loads((out / "sglang_draft.json").read_text())
    assert record["arguments"] == {
        "model_path": str(tiny_model_dir.resolve()),
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(out.resolve()),
        "speculative_num_draft_tokens": 4,
    }
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--speculative-draft-model-path {out.resolve()} --speculative-num-draft-tokens 4" in last


def test_a_directory_for_trees(
    tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_head("ctc").save_pretrained(tmp_path / "head")
    out = tmp_path / "draft"
    assert build(tiny_model_dir, tmp_path / "head", out, "--num-nodes", "2") == 0
    config = json.loads((out / "config.json").read_text())
    assert DraftSettings.read(type("Config", (), config), str(out)).shape == "tree"
    assert config["block_size"] == 3
    arguments = json.loads((out / "sglang_draft.json").read_text())["arguments"]
    assert (arguments["speculative_num_draft_tokens"], arguments["attention_backend"]) == (3, "flashinfer")
    capsys.readouterr()
    assert build(tiny_model_dir, tmp_path / "head", tmp_path / "other", "--num-nodes", "4") == 2
    assert "--num-nodes: must be between 1 and 3, the frames of this head" in capsys.readouterr().err
