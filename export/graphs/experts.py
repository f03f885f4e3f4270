"""Mixtures of experts as products of fixed shape: every expert is computed, and weighted by its routing."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "ctc_speculator_dense"


def dense_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Outputs [R, H] of rows [R, H]; an expert that a row is not routed to has weight zero.

    module: holds ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I]
    top_k_index, top_k_weights: the experts of every row and their weights, [R, K]
    """
    gate_up, down = module.gate_up_proj, module.down_proj
    experts = torch.arange(gate_up.shape[0], device=top_k_index.device)
    chosen = top_k_index.unsqueeze(-1) == experts  # [R, K, E]
    weights = (chosen * top_k_weights.unsqueeze(-1)).sum(1)
    inner = F.linear(hidden_states, gate_up.flatten(0, 1)).unflatten(-1, (experts.shape[0], -1))
    gate, up = inner.chunk(2, dim=-1)
    weighted = module.act_fn(gate) * up * weights.unsqueeze(-1)
    return F.linear(weighted.flatten(1), down.transpose(0, 1).flatten(1))


def register_experts() -> str:
    """Make the dense form known to transformers; returns its name for ``set_experts_implementation``."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, dense_experts)
    return NAME
