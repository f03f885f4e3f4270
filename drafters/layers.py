"""The transformer layer that draft heads are made of.

Its queries attend to the context (the target model's hidden states, projected) and to each other. Context
and queries share the key and value projections, so the keys and values of both fit into one KV cache.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig

# (query [B, QH, N, D], key [B, KH, S, D], value [B, KH, S, D], mask [B, 1, N, S] bool) -> [B, QH, N, D]
AttentionFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# cos, sin of some positions, each [B, 1, N, D]
Rotary = tuple[Tensor, Tensor]


def pick(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows of each sequence: rows [B, R, W], indices [B, Q] int64 -> [B, Q, W]."""
    return rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


class KeyValueCache(Protocol):
    """The keys and values of an incremental forward pass."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [B, KH, N, D]; returns all of them, [B, KH, S, D]."""
        ...


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Masked attention with grouped queries; ``mask`` is True where a query may attend."""
    groups = query.shape[1] // key.shape[1]
    if query.device.type != "cpu" and groups > 1:
        # With a mask, torch has no kernel on a GPU that takes grouped queries and keeps no scores in memory.
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # In one dtype, because the fused kernel does not take two.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., 2021), the half-rotation layout of Llama."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float):
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def forward(self, position_ids: Tensor) -> Rotary:
        """position_ids [B, N] int64 -> cos, sin, each [B, 1, N, D] float32."""
        angles = position_ids[:, :, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding to x [B, heads, N, D], as Hugging Face writes it: ``export`` fuses this."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class DraftLayer(nn.Module):
    """Pre-norm attention, then a SwiGLU MLP."""

    def __init__(
        self, config: DrafterConfig, layer: int, *, input_size: int | None = None, head_norms: bool = False
    ):
        """Layer number ``layer`` of a head.

        input_size: width I of the inputs of ``update``; None for the hidden size
        head_norms: norm queries and keys in every head before they are rotated, as Qwen3 does
        """
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(hidden_size, eps)
        inputs = input_size or hidden_size
        self.q_proj = nn.Linear(inputs, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps) if head_norms else None
        self.k_norm = RMSNorm(self.head_dim, eps) if head_norms else None
        self.post_norm = RMSNorm(hidden_size, eps)
        self.gate_proj = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden_size, bias=False)

    def forward(
        self,
        frames: Tensor,  # [B, N, H]
        context: Tensor,  # [B, A, H]
        key_rotary: Rotary,  # of context, then frames
        query_rotary: Rotary,  # of the frames
        attn_mask: Tensor,  # [B, 1, N, S] bool, S = A + N without a cache
        cache: KeyValueCache | None,
        attend: AttentionFunction,
    ) -> Tensor:
        normed = self.input_norm(frames)
        read = torch.cat((context, normed), dim=1)
        return self.update(frames, normed, read, key_rotary, query_rotary, attn_mask, cache, attend)

    def update(
        self,
        hidden: Tensor,  # [B, N, H], the residual stream
        queries: Tensor,  # [B, N, I], the source of queries
        read: Tensor,  # [B, R, I], the source of new keys and values
        key_rotary: Rotary,  # of ``read``
        query_rotary: Rotary,  # of ``queries``
        attn_mask: Tensor,  # [B, 1, N, S] bool, S = R without a cache
        cache: KeyValueCache | None,
        attend: AttentionFunction,
    ) -> Tensor:
        """The residual stream [B, N, H] after attention to ``read`` and the cache, and after the MLP."""
        key = self._heads(self.k_proj(read), self.num_kv_heads, self.k_norm)
        value = self._heads(self.v_proj(read), self.num_kv_heads)
        query = self._heads(self.q_proj(queries), self.num_heads, self.q_norm)
        key, query = rotate(key, *key_rotary), rotate(query, *query_rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        return self.finish(hidden, attend(query, key, value, attn_mask).transpose(1, 2).flatten(2))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The residual stream [..., H] after what was attended to, [..., QH*D], and after the MLP."""
        hidden = hidden + self.o_proj(attended)
        normed = self.post_norm(hidden)
        mixed: Tensor = self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return hidden + mixed

    def become_identity(self) -> None:
        """Let the layer add nothing to the residual stream, until it is trained."""
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.down_proj.weight)

    def _heads(self, x: Tensor, count: int, norm: RMSNorm | None = None) -> Tensor:
        heads = x.unflatten(-1, (count, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)
