"""The draft directory for TensorRT-LLM, and one line for what cannot be written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from drafters.base import Drafter
from export.build_engines import main
from export.tensorrt_llm_target import context_bytes
from integrations.draft_directory import DraftSettings
from integrations.tensorrt_llm.frames import Frames

Make = Callable[..., Drafter]


def build(model: Path, head: Path, out: Path, *options: str) -> int:
    command = ["--model", str(model), "--drafter", str(head), "--target", "tensorrt-llm", "--out", str(out)]
    return main([*command, *options])


@pytest.fixture
def written(tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path) -> tuple[Drafter, Path]:
    """A head with every kind of weight, and the draft directory that is made of it."""
    head = make_tiny_head("ctc", transition="mlp", frame_start="fused", num_candidates=9)
    head.save_pretrained(tmp_path / "head")
    assert build(tiny_model_dir, tmp_path / "head", tmp_path / "draft", "--max-context", "300") == 0
    return head, tmp_path / "draft"


def test_the_directory(
    written: tuple[Drafter, Path], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head, directory = written
    frames = Frames(head.config)
    assert set(load_file(directory / "model.safetensors")) == {n for n, _ in frames.named_parameters()}

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    for trust in (False, True):
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
        assert type(config).__name__ == ("CTCDraftConfig" if trust else "Qwen3Config")
        settings = DraftSettings.read(config, str(directory))
        assert settings.head == head.config
        # What the engine reads: of the target model the vocabulary and the positions, and the head's sizes.
        assert (config.vocab_size, config.max_position_embeddings) == (head.config.vocab_size, 512)
        assert (config.num_hidden_layers, config.num_key_value_heads) == (1, head.config.num_kv_heads)
        assert config.dflash_config == {"target_layer_ids": [0, 1], "mask_token_id": 0, "causal": False}
        assert config.block_size == head.config.num_frames + 1
        assert config.architectures == ["DFlashCTCForCausalLM"]

    served = yaml.safe_load((directory / "trtllm.yaml").read_text())
    assert served == {
        "max_batch_size": 16,
        "max_seq_len": 300,
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": str(directory.resolve()),
            "max_draft_len": 4,  # the head's frames
            "attention_backend": "VANILLA",
        },
    }
    model = str(tiny_model_dir.resolve())
    (triton,) = (directory / "triton").glob("*/1/model.yaml")
    assert yaml.safe_load(triton.read_text()) == {
        "model": model,
        "backend": "pytorch",
        **served,
        "triton_config": {"max_batch_size": 0, "decoupled": False},
    }
    record = json.loads((directory / "tensorrt_llm_draft.json").read_text())
    assert record["arguments"] == {"model": model, **served}


def test_the_memory_of_the_context() -> None:
    """A layer with 8 heads of 128 values in two bytes, 17 slots of 8192 positions and a block."""
    head: Any = SimpleNamespace(num_layers=1, num_kv_heads=8, head_dim=128)
    assert context_bytes(head, 8192, torch.bfloat16) == 17 * (8192 + 9) * 4096


def test_a_target_model_without_hidden_states_is_refused(
    tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2", num_hidden_layers=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen2")
    shutil.copy(tiny_model_dir / "tokenizer.json", tmp_path / "qwen2")
    make_tiny_head().save_pretrained(tmp_path / "head")
    assert build(tmp_path / "qwen2", tmp_path / "head", tmp_path / "draft") == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"build_engines: --model: {tmp_path / 'qwen2'}: model_type: expected llama or qwen3 or qwen3_moe, of "
        "which TensorRT-LLM gives the hidden states to a draft model, got 'qwen2'"
    )
