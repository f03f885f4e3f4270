"""Parameters counted from configurations: against real heads, and at the sizes of published models."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.build import build_drafter, count_extra_parameters, count_trained_parameters
from drafters.config import DrafterConfig, HeadSettings

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "base_num_layers": 4,
}
VICUNA_7B: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_heads": 32,
    "num_kv_heads": 32,
    "head_dim": 128,
    "base_num_layers": 32,
}
HEADS: dict[str, dict[str, Any]] = {
    "ctc": {},
    "medusa": {"drafter_type": "medusa", "own_lm_head": True},
    "eagle": {"drafter_type": "eagle"},
    "lossless": {"drafter_type": "streaming", "lora_rank": 4},
    "shared": {"drafter_type": "streaming", "stream_mode": "shared", "lora_rank": 4},
    "ctc streams": {"trunk": "streams", "transition": "mlp", "stream_start": "mlp", "num_candidates": 8},
}


def config_of(sizes: dict[str, Any], **settings: Any) -> DrafterConfig:
    layers = HeadSettings(**settings).default_target_layers(sizes["base_num_layers"])
    return DrafterConfig(**sizes, target_layer_ids=layers, **settings)


@pytest.mark.parametrize("name", HEADS)
def test_the_count_is_that_of_the_real_head(name: str) -> None:
    config = config_of(TINY, **HEADS[name])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
        )
    )
    head = build_drafter(config).attach_model(model)
    trained = sum(parameter.numel() for parameter in head.parameters())
    assert count_trained_parameters(config) == trained
    # Only adapters that are merged into the target model are not needed any more.
    merged = sum(value.numel() for key, value in head.state_dict().items() if key.startswith("lora."))
    assert count_extra_parameters(config) == trained - (merged if name == "shared" else 0)
    assert (merged > 0) == (config.trunk == "streams")
    # A head that was trained knows its target model's weights.
    tied = replace(config, base_weights="0" * 64)
    assert count_extra_parameters(tied) == count_extra_parameters(config)


@pytest.mark.parametrize(("frames", "published"), [(4, 5.91e8), (5, None)])
def test_streaming_has_a_thousandth_of_medusas_parameters(frames: int, published: float | None) -> None:
    """At Vicuna-7B's shape, which is OpenLLaMA-7B's: the paper's 5.91e8 and 8.2e4 (arXiv 2402.11131)."""
    medusa = config_of(VICUNA_7B, drafter_type="medusa", num_frames=frames, own_lm_head=True)
    streaming = config_of(VICUNA_7B, drafter_type="streaming", num_frames=frames, stream_mode="shared")
    # The streams' embeddings, and the adapter of the early exit.
    assert count_extra_parameters(streaming) == frames * 4096 + 2 * 8 * 4096
    assert count_extra_parameters(medusa) > 1000 * count_extra_parameters(streaming)
    if published is not None:
        assert count_extra_parameters(medusa) == pytest.approx(published, rel=2e-3)
        assert count_extra_parameters(streaming) == pytest.approx(8.2e4, rel=2e-3)


def test_rotated_streams_have_no_parameters_but_the_early_exit() -> None:
    config = config_of(VICUNA_7B, drafter_type="streaming", stream_mode="shared", stream_identity="rotation")
    assert count_extra_parameters(config) == 2 * 8 * 4096


def test_what_lora_costs() -> None:
    """In lossless mode the adapters stay: r (inputs + outputs) for each of seven projections a layer."""
    config = config_of(VICUNA_7B, drafter_type="streaming", num_frames=4, num_layers=3)
    one_layer = 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert count_extra_parameters(config) == 3 * one_layer + 4 * 4096 + 2 * 8 * 4096
    assert count_trained_parameters(config) == count_extra_parameters(config)


def test_ctc_heads_lie_between() -> None:
    ctc, medusa = (
        config_of(VICUNA_7B),
        config_of(VICUNA_7B, drafter_type="medusa", num_frames=5, own_lm_head=True),
    )
    assert 1e8 < count_extra_parameters(ctc) < count_extra_parameters(medusa) == 739_270_656
