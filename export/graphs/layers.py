"""The operators that the layers of a target model or a draft head become in a graph.

A cached attention layer becomes two ONNX operators of opset 24: ``Attention`` with an explicit mask, and
``TensorScatter`` into a cache of fixed capacity. Both are emitted symbolically while torch.export traces the
model, so the model's own code stays unchanged. The masks of layers with a sliding window are derived inside
the graph from the one mask that it is given. Mixtures of experts become products of fixed shape.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from drafters.target_models import MODEL_FAMILIES, sliding_window

# Stands for minus infinity in the forms of products; it is finite so that no masked query becomes NaN.
MASKED_SCORE = -1e30
# Columns of the matrix of ones with which weights are added up: one vector of a processor.
TOTAL_COLUMNS = 16
# The name by which transformers knows the exported form of experts.
DENSE_EXPERTS = "ctc_speculator_dense"

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


def attention_invariant(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None = None
) -> Tensor:
    """The same, with the same bits for a row however many rows are computed and wherever its keys lie.

    A product adds up its terms in the order of the keys, so keys that are masked change no sum: their weights
    are exactly 0. The sum of the weights is a product too, with a matrix of ones, because a reduction adds up
    in an order that depends on where a key lies. A product of one row takes another kernel than a product of
    several, so there are always two rows at least. What is left is the block of keys by which a product cuts
    its sum (``runtime.engines.ort.key_block``).

    softcap: scores are kept between this and its negative by tanh, before they are masked
    """
    batch, heads, count, head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups * count, head_dim)
    bias = torch.cat([torch.where(mask, 0.0, MASKED_SCORE)] * groups, dim=2)  # the same in every layer
    if groups == 1:
        rows, bias = (torch.cat((each, each[:, :, :1]), dim=2) for each in (rows, bias))
    scores = (rows * scale) @ key.transpose(-1, -2)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + bias
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights @ value.new_ones(mask.shape[-1], TOTAL_COLUMNS)
    output = (weights @ value) / total[..., :1]
    if groups == 1:
        output = output[:, :, :count]
    return output.reshape(batch, heads, count, head_dim)


ATTENTION_OPS: dict[str, AttentionOp] = {
    "fused": attention_fused,
    "grouped": attention_grouped,
    "primitive": attention_primitive,
    "invariant": attention_invariant,
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
    """The result of ``scatter`` in PyTorch, for which the operator itself is only a symbol."""
    rows = write_index.unsqueeze(1) + torch.arange(update.shape[2])  # [B, N]
    index = rows.view(rows.shape[0], 1, -1, 1).expand_as(update)
    return past.scatter(2, index, update)


class ScatterCache(Cache):
    """A cache for Hugging Face models and draft heads whose update writes into given buffers.

    past: key and value buffers of every layer, each [B, KH, S, D]; ``present`` holds the results.
    first_layer: the model's number of the layer that the first buffers belong to
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
            capped = attention_invariant if kind == "invariant" else attention_primitive
            output = capped(query, key, value, attention_mask, scale, softcap)
        return output.transpose(1, 2), None

    name = f"ctc_speculator_{kind}"
    AttentionInterface.register(name, attention)
    return name


def key_positions(position_ids: Tensor, write_index: Tensor, capacity: int) -> Tensor:
    """Positions [B, S] of the keys in the cache during a step that writes N keys at ``write_index``.

    A slot before ``write_index`` holds the key of its own position. The N slots from there on hold the new
    keys, whose positions are ``position_ids`` [B, N]: in a tree several nodes share one. Slots after those
    are empty, and the mask that a step is given hides them.
    """
    slots = torch.arange(capacity, device=position_ids.device).expand(position_ids.shape[0], -1)
    token = slots - write_index.unsqueeze(1)
    # TensorRT's Clip takes no integers.
    is_new = (token >= 0) & (token < position_ids.shape[1])
    return torch.where(is_new, position_ids.gather(1, torch.where(is_new, token, 0)), slots)


def windowed_mask(
    mask: Tensor, position_ids: Tensor, write_index: Tensor, window: int, written: Tensor | None = None
) -> Tensor:
    """``mask`` [B, 1, N, S] without the keys that are ``window`` or more positions before their query.

    written: [B, W] int64, the positions of the keys that the step writes; None where they are the queries'
    """
    keys = key_positions(position_ids if written is None else written, write_index, mask.shape[-1])
    # A row without any key would not be a number. In a batch an idle slot has positions behind all keys.
    queries = torch.where(position_ids < mask.shape[-1], position_ids, mask.shape[-1] - 1)
    return mask & (keys[:, None, None, :] > queries[:, None, :, None] - window)


def attention_masks(config: Any, inputs: dict[str, Tensor], context: int) -> Tensor | dict[str, Tensor]:
    """``layer_masks`` of a pass that writes the key of every token that it reads."""
    positions, start = inputs["position_ids"], inputs["write_index"]
    return layer_masks(
        config,
        inputs["attn_mask"],
        positions=positions,
        written=positions,
        write_index=start,
        context=context,
    )


def layer_masks(
    config: Any, mask: Tensor, *, positions: Tensor, written: Tensor, write_index: Tensor, context: int
) -> Tensor | dict[str, Tensor]:
    """The mask of all layers, or of every type of layer, as the model's forward expects it.

    mask: [B, 1, N, S] bool; positions: [B, N] int64 of its rows; written: as of ``windowed_mask``
    context: the positions that are served; a window that reaches over all of them needs no mask of its own
    """
    window = sliding_window(config)
    if window is None or window >= context:
        return mask
    narrow = windowed_mask(mask, positions, write_index, window, written)
    if MODEL_FAMILIES[config.model_type].window == "all":
        return narrow
    return {"full_attention": mask, "sliding_attention": narrow}


def dense_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert is computed, and its output weighted by the routing: rows [R, H] -> [R, H].

    An expert that a row is not routed to has weight zero.

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
    ALL_EXPERTS_FUNCTIONS.register(DENSE_EXPERTS, dense_experts)
    return DENSE_EXPERTS
