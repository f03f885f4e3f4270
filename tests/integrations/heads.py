"""Configurations of heads."""

from typing import Any

from drafters.config import DrafterConfig


def head_config(**settings: Any) -> DrafterConfig:
    sizes = {
        "vocab_size": 90,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "target_layer_ids": (1,),
        "base_num_layers": 4,
    }
    return DrafterConfig(**{**sizes, **settings})
