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
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, dynamic_module_utils

from drafters.base import Drafter
from export.build_engines import main
from export.tensorrt_llm_target import context_bytes
from integrations.draft_directory import DraftSettings
from integrations.tensorrt_llm.model import Frames
from tests.integrations.tensorrt_llm.arguments import TorchLlmArgs, TritonConfig

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
        "max_num_tokens": 8192,
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


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "ctc": ("DFlash", {}),
    "dspark": ("DSpark", {"trunk": "dspark", "transition": "markov", "num_layers": 1, "num_candidates": 9}),
    "dflash": ("DFlash", {"trunk": "dflash", "num_layers": 1}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_the_engine_s_schema(kind: str, tiny_model_dir: Path, make_tiny_head: Make, tmp_path: Path) -> None:
    """Triton's model takes its own settings out of model.yaml; the rest are the engine's arguments."""
    decoding_type, settings = HEADS[kind]
    head = make_tiny_head("ctc" if kind == "ctc" else "block", **settings)
    head.save_pretrained(tmp_path / "head")
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16384}))
    assert build(model, tmp_path / "head", tmp_path / "draft", "--max-context", "9000") == 0
    (triton,) = (tmp_path / "draft/triton").glob("*/1/model.yaml")
    served = yaml.safe_load(triton.read_text())
    TritonConfig.model_validate(served.pop("triton_config"))
    command_line = {"model": str(model), "backend": "pytorch"}
    for values in (served, {**command_line, **yaml.safe_load((tmp_path / "draft/trtllm.yaml").read_text())}):
        arguments = TorchLlmArgs.model_validate(values)
        assert arguments.speculative_config is not None
        assert arguments.speculative_config.decoding_type == decoding_type
        # A prompt that fills a sequence is one pass.
        assert arguments.max_num_tokens == arguments.max_seq_len == 9000

    for section, name, wrong in (
        ("speculative_config", "decoding_type", decoding_type.lower()),
        ("speculative_config", "attention_backend", "FLASHINFER"),
        ("speculative_config", "max_draft_len", 0),
        ("speculative_config", "num_drafts", 4),
        ("kv_cache_config", "free_gpu_memory_fraction", 80),
    ):
        with pytest.raises(ValidationError, match=name):
            TorchLlmArgs.model_validate({**served, section: {**served[section], name: wrong}})
    fewer = {**served["speculative_config"], "max_draft_len": 2}
    if decoding_type == "DSpark":
        with pytest.raises(ValidationError, match="block_size"):
            TorchLlmArgs.model_validate({**served, "speculative_config": fewer})
    else:
        TorchLlmArgs.model_validate({**served, "speculative_config": fewer})


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
        f"build_engines: --model: {tmp_path / 'qwen2'}: model_type: expected llama or qwen3 or qwen3_moe, "
        "whose hidden states TensorRT-LLM gives to a draft model, got 'qwen2'"
    )
