"""Random models of every supported family, each exported once a session."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.decoder import SpeculativeDecoder
from runtime.trees.token_tree import TokenTree

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Case:
    """A model configuration and what its graph is expected to hold."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    attention: str = "op"
    norms_per_layer: int = 2
    rotary_per_layer: int = 2

    @property
    def tied(self) -> bool:
        return bool(self.settings.get("tie_word_embeddings", False))


CASES = {
    case.name: case
    for case in (
        Case("llama", "llama"),
        Case("llama-linear-tied", "llama", {"rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
        Case("llama3-primitive", "llama", {"rope_parameters": LLAMA3_ROPE}, attention="primitive"),
        Case("mistral", "mistral", {"sliding_window": None}),
        Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True}),
        # Query and key norms, and heads wider than hidden_size / heads.
        Case("qwen3-tied", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}, norms_per_layer=4),
        Case("olmo2", "olmo2", norms_per_layer=4),
        Case("phi3", "phi3", {"sliding_window": None}),
        # Only half of each head is rotated.
        Case(
            "phi3-half-primitive",
            "phi3",
            {"sliding_window": None, "rope_parameters": HALF_ROPE},
            attention="primitive",
        ),
    )
}


@pytest.fixture(scope="session")
def make_model(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, dict[str, Any]], Path]:
    """Write a random model of a type and settings, with the tiny tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type: str, settings: dict[str, Any]) -> Path:
        directory = tmp_path_factory.mktemp(model_type) / "model"
        values = {**SIZES, "vocab_size": 258, "tie_word_embeddings": False, **settings}
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values)).save_pretrained(
            directory
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model_dir / name, directory)
        return directory

    return make


@dataclass(frozen=True)
class Exported:
    case: Case
    model_dir: Path
    bundle: Bundle


@pytest.fixture(scope="session", params=CASES.values(), ids=CASES)
def exported(
    request: pytest.FixtureRequest,
    make_model: Callable[[str, dict[str, Any]], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:
    """Each supported family as a bundle without a draft head."""
    from export.build_engines import build
    from export.options import Options

    case: Case = request.param
    model_dir = make_model(case.model_type, case.settings)
    out = tmp_path_factory.mktemp(case.name) / "bundle"
    bundle = build(model_dir, out, options=Options(attention=case.attention))
    return Exported(case, model_dir, bundle)


@pytest.fixture(scope="session")
def first_tree() -> Callable[[SpeculativeDecoder, NDArray[np.int64], int], TokenTree]:
    """The draft after a prompt that is read in chunks of the given size."""

    def draft(decoder: SpeculativeDecoder, prompt: NDArray[np.int64], size: int) -> TokenTree:
        backbone, drafter = decoder.batch.backbone, decoder.batch.drafter
        backbone.reset()
        drafter.reset(0)
        for start in range(0, prompt.size, size):
            chunk = prompt[start : start + size]
            verdict = backbone.prefill(chunk, start)
            drafter.observe(0, chunk, verdict.features)
        anchor = int(verdict.next_tokens[0])
        return drafter.transform(drafter.draft([anchor], 12)[0], anchor=anchor, num_nodes=12)

    return draft
