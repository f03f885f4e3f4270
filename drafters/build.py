"""From a configuration to the draft head it describes, and to the number of its parameters."""

import dataclasses
import pkgutil
from pathlib import Path
from typing import Any

import torch

from drafters.base import Drafter
from drafters.config import DrafterConfig


def build_drafter(config: DrafterConfig) -> Drafter:
    """A fresh draft head of the configuration's type and trunk."""
    head: Drafter = pkgutil.resolve_name(config.trunk_type.module)(config)
    return head


def load_drafter(directory: Path | str) -> Drafter:
    """Load a checkpoint in float32. Raises DrafterConfigError with the reason."""
    directory = Path(directory)
    return build_drafter(DrafterConfig.load(directory)).load_weights(directory)


def count_trained_parameters(config: DrafterConfig) -> int:
    """The parameters that training fits. The target model's own, which a head shares, are not counted."""
    return sum(parameter.numel() for parameter in meta_head(config).parameters())


def count_extra_parameters(config: DrafterConfig) -> int:
    """The parameters that decoding needs beside the model's; merged adapters do not count."""
    merges = config.trunk_type.borrows_layers and config.stream_mode == "shared"
    return sum(
        parameter.numel()
        for name, parameter in meta_head(config).named_parameters()
        if not (merges and name.startswith("lora."))
    )


def meta_head(config: DrafterConfig) -> Drafter:
    """The head on the meta device, where tensors have shapes and no values."""
    with torch.device("meta"):
        if not config.trunk_type.borrows_layers:
            return build_drafter(config)
        # Adapters are as large as the layers that they belong to; those below need not be there, nor any
        # model's own weights.
        config = dataclasses.replace(
            config, base_num_layers=config.num_layers + 1, target_layer_ids=(0,), base_weights=""
        )
        return build_drafter(config).attach_model(_meta_model(config))


def _meta_model(config: DrafterConfig) -> Any:
    """A target model of the configuration's sizes with the projections of Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.base_num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
    )
