"""The two ONNX operators (opset 24) that a cached attention layer becomes.

They are ``Attention`` with an explicit mask and ``TensorScatter`` into a cache of fixed capacity. Both are
emitted symbolically while torch.export traces the model, so the model's own code stays unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

# Replaces minus infinity in the primitive form; it is finite so that no masked query becomes NaN.
MASKED_SCORE = -1e30

AttentionOp = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def attention_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """ONNX Attention. query [B, QH, N, D]; key, value [B, KH, S, D]; mask [B, 1, N, S] bool."""
    output: Tensor = torch.onnx.ops.symbolic(
        "Attention",
        (query, key, value, mask),
        {"scale": scale},
        dtype=query.dtype,
        shape=query.shape,
        version=24,
    )
    return output


def attention_grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same, with the query heads of a group as further rows of one head.

    TensorRT's kernel copies keys and values once for each query head; here it copies them as they are.
    """
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return attention_fused(query, key, value, mask, scale)
    rows = query.unflatten(1, (key.shape[1], groups)).flatten(2, 3)  # [B, KH, G*N, D]
    output = attention_fused(rows, key, value, torch.cat([mask] * groups, dim=2), scale)
    return output.unflatten(2, (groups, -1)).flatten(1, 2)


def attention_primitive(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """The same from MatMul, Where and Softmax, for runtimes whose fused kernel is not trusted.

    softcap: scores are kept between this and its negative by tanh, before they are masked
    """
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups)) * scale  # [B, KH, G, N, D]
    scores = grouped @ key.unsqueeze(2).transpose(-1, -2)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = torch.where(mask.unsqueeze(1), scores, MASKED_SCORE)
    return (scores.softmax(-1) @ value.unsqueeze(2)).flatten(1, 2)


ATTENTION_OPS: dict[str, AttentionOp] = {
    "fused": attention_fused,
    "grouped": attention_grouped,
    "primitive": attention_primitive,
}


def scatter(past: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    """ONNX TensorScatter: ``past`` [B, KH, S, D] with ``update`` [B, KH, N, D] at ``write_index`` [B]."""
    output: Tensor = torch.onnx.ops.symbolic(
        "TensorScatter",
        (past, update, write_index),
        {"axis": 2},
        dtype=past.dtype,
        shape=past.shape,
        version=24,
    )
    return output


def scattered(past: Tensor, update: Tensor, write_index: Tensor) -> Tensor:
    """What ``scatter`` computes, in PyTorch, to which the operator is only a symbol."""
    rows = write_index.unsqueeze(1) + torch.arange(update.shape[2])  # [B, N]
    index = rows.view(rows.shape[0], 1, -1, 1).expand_as(update)
    return past.scatter(2, index, update)


class ScatterCache(Cache):
    """A cache for Hugging Face models and draft heads whose update writes into given buffers.

    past: key and value buffers of every layer, each [B, KH, S, D]; ``present`` holds the results.
    first_layer: what the model calls the layer of the first buffers
    """

    def __init__(self, past: list[Tensor], write_index: Tensor, first_layer: int = 0):
        super().__init__(layers=[])
        self.present = list(past)
        self._write_index = write_index
        self._first_layer = first_layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        at = 2 * (layer_idx - self._first_layer)
        self.present[at] = scatter(self.present[at], key_states, self._write_index)
        self.present[at + 1] = scatter(self.present[at + 1], value_states, self._write_index)
        return self.present[at], self.present[at + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def register_attention(kind: str) -> str:
    """Make an attention form known to transformers; returns its name for ``set_attn_implementation``.

    Scores with a soft cap always take the primitive form: not every runtime's fused kernel has one.
    """
    operator = ATTENTION_OPS[kind]

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if softcap is None:
            output = operator(query, key, value, attention_mask, scale)
        else:
            output = attention_primitive(query, key, value, attention_mask, scale, softcap)
        return output.transpose(1, 2), None

    name = f"ctc_speculator_{kind}"
    AttentionInterface.register(name, attention)
    return name
