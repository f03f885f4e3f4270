"""Attention that reads the caches in place, as NVIDIA's compiler reports its memory."""

from typing import Any

import pytest
from transformers import Gemma2Config, LlamaConfig

from export.options import FUSED
from export.trt.attention import drafter_reads_in_place, target_model_reads_in_place
from export.trt.plan import backbone_capacity
from runtime.core.bundle import EnginePlan

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)


def test_a_pass_needs_no_copy_of_keys_and_values() -> None:
    """Less than the keys of one layer have, 32 MiB: a copy for every query head has four times as many."""
    from benchmarks.experiments.attention_memory import activations

    plan = EnginePlan(max_context=4096, max_num_seqs=4, max_nodes=8, prefill_chunk=64)
    (found,) = activations(plan, FUSED, [backbone_capacity(plan, None)], "sm89", sliced=False)
    assert found < 4 * 8 * 4096 * 128 * 2


@pytest.mark.parametrize(
    ("config", "activations", "attention", "expected"),
    [
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float16", None, True),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "bfloat16", "fused", True),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float32", None, False),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=2), "float16", "grouped", False),
        (LlamaConfig(num_attention_heads=8, num_key_value_heads=8), "float16", None, False),
        (Gemma2Config(), "float16", None, False),
    ],
)
def test_which_models_read_in_place(
    config: Any, activations: str, attention: str | None, expected: bool
) -> None:
    assert target_model_reads_in_place(config, activations, attention) == expected


def test_which_heads_read_in_place(make_tiny_head: Any) -> None:
    head = make_tiny_head()
    assert drafter_reads_in_place(head.config, "float16", None) == (
        head.config.num_kv_heads < head.config.num_heads
    )
