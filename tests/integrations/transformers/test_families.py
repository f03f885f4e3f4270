"""Architectures of Transformers: those that our engines run, and others."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from drafters.target_models import MODEL_FAMILIES
from integrations.transformers.drafts import DraftOptions
from integrations.transformers.head import SpeculativeHead
from tests.integrations.transformers.models import (
    PROMPT,
    SIZES,
    KnownDrafts,
    make_head,
    make_model,
    with_drafts,
)

NEW_TOKENS = 16
WINDOW = {"sliding_window": 64}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, **WINDOW},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "tie_word_embeddings": True, **WINDOW},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [0],
    },
    "gemma2": {**CAPPED, **WINDOW},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 5.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": WINDOW,
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"], **WINDOW},
}
# Learned positions, layers in parallel, LM heads of other names, several heads on one key, attention sinks.
OTHERS = ("gpt2", "gpt_neox", "opt", "falcon", "stablelm", "starcoder2", "cohere", "llama4_text", "gpt_oss")


def batch() -> dict[str, torch.Tensor]:
    pad = SIZES["pad_token_id"]
    ids = [[pad] * 3 + PROMPT[:4], PROMPT]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([[0] * 3 + [1] * 4, [1] * 7])}


@pytest.mark.parametrize("model_type", [*MODEL_FAMILIES, *OTHERS])
def test_greedy_text(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    model = make_model(model_type, **SETTINGS.get(model_type, {}))
    options: dict[str, Any] = {
        **batch(),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = model.generate(**options)
    assert len(set(expected[1, len(PROMPT) :].tolist())) > 2
    head = SpeculativeHead(make_head(model), model, DraftOptions(num_nodes=6))
    assert torch.equal(model.generate(custom_generate=head, **options), expected)
    texts = [expected[0, 3:].tolist(), expected[1].tolist()]
    with_drafts(monkeypatch, head, lambda: KnownDrafts(texts, 0.7))
    assert torch.equal(model.generate(custom_generate=head, **options), expected)
    assert head.tokens_per_step > 2


# A window in every layer, in one of two, and in the first.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "starcoder2": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("window", [2, 5, 11])
@pytest.mark.parametrize("model_type", WINDOWS)
def test_texts_longer_than_the_window(monkeypatch: pytest.MonkeyPatch, model_type: str, window: int) -> None:
    """From windows inside of a tree to one that the texts outgrow one after the other."""
    model = make_model(model_type, **WINDOWS[model_type], sliding_window=window)
    options: dict[str, Any] = {
        **batch(),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = model.generate(**options)
    head = SpeculativeHead(make_head(model), model, DraftOptions(num_nodes=6))
    texts = [expected[0, 3:].tolist(), expected[1].tolist()]
    with_drafts(monkeypatch, head, lambda: KnownDrafts(texts, 0.7))
    assert torch.equal(model.generate(custom_generate=head, **options), expected)
    assert head.tokens_per_step > 2


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_a_cache_without_windows_of_its_own(monkeypatch: pytest.MonkeyPatch, model_type: str) -> None:
    """One that is made without the model's configuration keeps everything; the layers still have windows."""
    model = make_model(model_type, **WINDOWS[model_type], sliding_window=5)
    options: dict[str, Any] = {**batch(), "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    expected = model.generate(**options)
    head = SpeculativeHead(make_head(model), model, DraftOptions(num_nodes=6))
    texts = [expected[0, 3:].tolist(), expected[1].tolist()]
    with_drafts(monkeypatch, head, lambda: KnownDrafts(texts, 0.7))
    cache = DynamicCache()
    assert torch.equal(model.generate(custom_generate=head, past_key_values=cache, **options), expected)
    assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "settings", [{}, {"frame_start": "fused", "transition": "mlp"}, {"drafter_type": "eagle"}]
)
def test_half_precision(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """Rounding may change the text, so only that it runs, and that positions are not rounded."""
    model = make_model("llama").to(dtype)
    drafter = make_head(model.float(), **settings)
    head = SpeculativeHead(drafter, model.to(dtype), DraftOptions(num_nodes=6))
    text = model.generate(**batch(), max_new_tokens=8, do_sample=False, custom_generate=head)
    assert text.shape == (2, len(PROMPT) + 8)
    kinds = {name.rpartition(".")[2]: buffer.dtype for name, buffer in drafter.named_buffers()}
    assert kinds["inv_freq"] == torch.float32
    assert {parameter.dtype for parameter in drafter.parameters()} == {dtype}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_ways_to_attend(attention: str) -> None:
    model = make_model("llama", attn_implementation=attention)
    head = SpeculativeHead(make_head(model), model)
    options: dict[str, Any] = {**batch(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    assert torch.equal(model.generate(custom_generate=head, **options), model.generate(**options))
