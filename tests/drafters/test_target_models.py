"""Which target models are refused, and what their families need: masks, the last norm, the logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.features import FeatureTap
from drafters.target_models import (
    MODEL_FAMILIES,
    TargetModelError,
    check_target_model,
    last_layer_logits,
    output_norm_weight,
    rope_parameters,
    sliding_window,
)
from tests.export.conftest import CASES, GEMMA3_ROPE, SIZES

TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"]}


def config_of(model_type: str, **settings: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SIZES, "vocab_size": 60, **settings})


def test_every_family_is_exported_in_a_test() -> None:
    assert {case.model_type for case in CASES.values()} == MODEL_FAMILIES.keys()


@pytest.mark.parametrize("model_type", MODEL_FAMILIES)
def test_usual_settings_are_accepted(model_type: str) -> None:
    check_target_model(AutoConfig.for_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("gpt2", {}, "model_type: must be one of llama, .*smollm3, got 'gpt2'"),
        ("gemma3", {}, "model_type: must be one of .*gemma3_text.*, got 'gemma3'"),
        ("phi3", {"rope_parameters": LONG_ROPE, **SIZES}, "rope_type: must be one of .* got 'longrope'"),
        ("llama", {"rope_parameters": DYNAMIC_ROPE}, "rope_type: must be one of .*yarn .* got 'dynamic'"),
        (
            "gemma3_text",
            {"rope_parameters": {**GEMMA3_ROPE, "full_attention": DYNAMIC_ROPE}},
            "rope_type: must be one of default, linear, llama3, yarn .* got 'dynamic'",
        ),
        (
            "qwen2",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config: expected weights in floats",
        ),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected causal"),
    ],
)
def test_what_is_refused(model_type: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TargetModelError, match=message):
        check_target_model(AutoConfig.for_model(model_type, **settings))


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"sliding_window": 8}, None),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, 8),
        ("gemma2", {"sliding_window": 8}, 8),
        ("gemma2", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, None),
        ("qwen3_moe", {"sliding_window": 8}, None),
        ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, 8),
    ],
)
def test_sliding_window(model_type: str, settings: dict[str, Any], expected: int | None) -> None:
    assert sliding_window(config_of(model_type, **settings)) == expected


def test_rotary_bases_by_layer_type() -> None:
    assert rope_parameters(config_of("gemma3_text", rope_parameters=GEMMA3_ROPE, **BY_LAYER)) == GEMMA3_ROPE
    assert rope_parameters(config_of("llama"))["full_attention"]["rope_theta"] == 10000.0


@torch.no_grad()
@pytest.mark.parametrize("case", [CASES[name] for name in ("llama", "gemma2-tied", "gemma3", "granite")])
def test_logits_of_the_last_layer(case: Any) -> None:
    """Soft labels are the model's own distribution, and heads start as its own last norm."""
    torch.manual_seed(0)
    config = config_of(case.model_type, **case.settings)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    weight = model.get_decoder().norm.weight
    weight.copy_(torch.linspace(0.3, 2, weight.numel()))
    tap = FeatureTap(model, (config.num_hidden_layers - 1,))
    expected = model(torch.arange(2, 20)[None]).logits
    hidden = tap.take()
    torch.testing.assert_close(last_layer_logits(model, hidden), expected, **TOLERANCE)
    normed = F.rms_norm(hidden, hidden.shape[-1:], output_norm_weight(model), config.rms_norm_eps)
    logits = F.linear(normed, model.lm_head.weight)
    cap = case.settings.get("final_logit_softcapping")
    torch.testing.assert_close((logits / cap).tanh() * cap if cap else logits, expected, **TOLERANCE)
