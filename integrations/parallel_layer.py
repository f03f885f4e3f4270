"""The layer of ``drafters.layers`` with an engine's parallel projections, and how it takes its weights.

vLLM and SGLang have projections of the same names and arguments. Each adds its own attention and cache.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import RMSNorm, Rotary, rotate
from integrations.draft_directory import checked_weights

# By a projection's name in the checkpoint: the merged projection, and what an engine calls its part of that.
MERGED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class Projections:
    """An engine's classes of projections: of queries, keys and values; of columns; of rows."""

    qkv: Callable[..., nn.Module]
    columns: Callable[..., nn.Module]
    rows: Callable[..., nn.Module]


class ParallelLayer(nn.Module):
    """Pre-norm attention of frames to the context and to each other, then a SwiGLU MLP.

    world: devices that share the layer; prefix: a name that no other layer has
    """

    def __init__(self, config: DrafterConfig, projections: Projections, *, world: int, prefix: str):
        super().__init__()
        hidden = config.hidden_size
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // world
        self.num_kv_heads = max(1, config.num_kv_heads // world)
        self.sizes = [self.num_heads * config.head_dim, *[self.num_kv_heads * config.head_dim] * 2]
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = projections.qkv(
            hidden,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = projections.rows(
            config.num_heads * config.head_dim, hidden, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.gate_up_proj = projections.columns(
            hidden, [config.intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = projections.rows(
            config.intermediate_size, hidden, bias=False, prefix=f"{prefix}.down_proj"
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[R, H] -> queries, keys and values of this device's heads, each [R, heads * D], not rotated."""
        query, key, value = self.qkv_proj(x)[0].split(self.sizes, dim=-1)
        return query, key, value

    def rotated(self, projected: Tensor, rotary: Rotary) -> Tensor:
        """[R, heads * D] -> [R, heads, D]."""
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1).unsqueeze(0)
        return rotate(heads, *rotary).squeeze(0).transpose(0, 1).contiguous()

    def finish(self, frames: Tensor, attended: Tensor) -> Tensor:
        """The residual stream [R, H] after attention [R, heads * D] and the MLP."""
        frames = frames + self.o_proj(attended)[0]
        gate, up = self.gate_up_proj(self.post_norm(frames))[0].chunk(2, dim=-1)
        mixed: Tensor = self.down_proj(F.silu(gate) * up)[0]
        return frames + mixed


def load_parallel(
    own: dict[str, nn.Parameter],
    weights: Iterable[tuple[str, Tensor]],
    default_loader: Callable[..., Any],
) -> None:
    """Fill parameters, by their names, with a draft directory's weights; each device takes its part.

    default_loader: the engine's, for parameters without a loader of their own. Raises DraftError for a weight
    that is missing, or that the head does not have.
    """
    expected = [checkpoint_name for name in own for checkpoint_name in checkpoint_names(name)]
    for name, tensor in checked_weights(weights, expected):
        part = name.split(".")[-2] if "." in name else ""
        whole, shard = MERGED.get(part, (part, None))
        parameter = own[name.replace(part, whole) if part else name]
        loader = getattr(parameter, "weight_loader", default_loader)
        loader(parameter, tensor, *([] if shard is None else [shard]))


def checkpoint_names(name: str) -> list[str]:
    """The weights of a draft directory that a parameter is made of."""
    parts = name.split(".")
    merged = [part for part, (whole, _) in MERGED.items() if len(parts) > 1 and whole == parts[-2]]
    return [name.replace(parts[-2], part) for part in merged] or [name]
