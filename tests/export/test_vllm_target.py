"""The draft directory for vLLM: the head's own weights, and one line for what cannot be written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters.base import Drafter
from drafters.parallel import ParallelDrafter
from export.build_engines import main
from integrations.draft_directory import DraftSettings

Make = Callable[..., Drafter]


@pytest.fixture
def written(tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """Writes the draft directory of a head of these settings: the head, and the directory."""

    def write(drafter_type: str, **settings: Any) -> tuple[Any, Path]:
        head = make_tiny_head(drafter_type, **settings)
        for parameter in head.parameters():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        head.save_pretrained(tmp_path / "head")
        command = ["--model", str(tiny_model_dir), "--drafter", str(tmp_path / "head"), "--target", "vllm"]
        assert main([*command, "--out", str(tmp_path / "draft"), "--top-k", "6"]) == 0
        return head, tmp_path / "draft"

    return write


@pytest.mark.parametrize("transition", ["none", "markov", "mlp"])
@pytest.mark.parametrize("drafter_type", ["ctc", "block"])
def test_the_directory_holds_the_head(
    written: Callable[..., tuple[Any, Path]], drafter_type: str, transition: str
) -> None:
    head, directory = written(drafter_type, transition=transition, frame_start="fused", num_candidates=9)
    assert isinstance(head, ParallelDrafter)
    weights = load_file(directory / "model.safetensors")
    for name, value in head.state_dict().items():
        if not name.startswith("transition."):
            assert torch.equal(weights.pop(name), value)
    if head.transition is not None:
        ids = torch.tensor([[0, 5, 9]])
        tables = {name.removeprefix("tables."): weights.pop(name) for name in list(weights)}
        previous = head.transition.of_previous(ids, head.embed_tokens)
        assert torch.allclose(tables["previous.weight"][ids], previous, atol=1e-6)
        following = tables["following.weight"][ids]
        if head.config.has_blank:
            following = torch.cat((following, tables["blank"].expand(1, 1, -1)), dim=1)
        assert torch.allclose(following, head.transition.of_following(ids, head.lm_head), atol=1e-6)
        assert ("frame.weight" in tables) == (transition == "mlp")
    assert not weights
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["DFlashCTCForCausalLM"]
    assert config["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": 0, "causal": False}
    assert (config["vocab_size"], config["max_position_embeddings"]) == (head.config.vocab_size, 512)
    settings = DraftSettings.read(type("Config", (), config), str(directory))
    assert (settings.head, settings.top_k) == (head.config, 6)


def test_triton_s_model_serves_the_directory(
    written: Callable[..., tuple[Any, Path]], tiny_model_dir: Path
) -> None:
    _, directory = written("ctc")
    (model,) = (directory / "triton").iterdir()
    assert 'backend: "vllm"' in (model / "config.pbtxt").read_text()
    arguments = json.loads((model / "1" / "model.json").read_text())
    assert arguments["model"] == str(tiny_model_dir.resolve())
    assert arguments["speculative_config"] == {
        "method": "dflash",
        "model": str(directory.resolve()),
        "num_speculative_tokens": 3,  # of the head's 4 frames
        "use_local_argmax_reduction": True,
    }
    assert json.loads((directory / "vllm_draft.json").read_text())["arguments"] == arguments


def test_a_head_of_another_model_is_forced(
    written: Callable[..., tuple[Any, Path]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    written("ctc")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model": "another"}))
    command = ["--model", str(tiny_model_dir), "--drafter", str(tmp_path / "head"), "--target", "vllm"]
    command += ["--out", str(tmp_path / "draft")]
    assert main(command) == 2
    assert main([*command, "--force"]) == 0


def test_a_head_is_needed(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "draft")
    assert main(["--model", str(tiny_model_dir), "--target", "vllm", "--out", out]) == 2
    assert capsys.readouterr().err.startswith("build_engines: --drafter: expected a draft head")


def test_another_directory_is_not_replaced(
    tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_head().save_pretrained(tmp_path / "head")
    command = ["--model", str(tiny_model_dir), "--drafter", str(tmp_path / "head"), "--target", "vllm"]
    assert main([*command, "--out", str(tmp_path / "head")]) == 2
    assert "is not empty and is no directory with vllm_draft.json" in capsys.readouterr().err
