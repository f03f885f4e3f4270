"""The layer of ``drafters.layers`` with vLLM's parallel projections, cache and attention."""

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from drafters.config import DrafterConfig
from drafters.layers import RMSNorm, Rotary, rotate

# Of every merged projection, the checkpoint's names and what vLLM calls their parts.
MERGED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class FrameLayer(nn.Module):
    """Pre-norm attention of frames to the context and to each other, then a SwiGLU MLP.

    prefix: a name that no other layer has; vLLM finds the layer's cache by it
    cache_config: vLLM's
    """

    def __init__(self, config: DrafterConfig, *, prefix: str, cache_config: object):
        super().__init__()
        hidden, world = config.hidden_size, get_tensor_model_parallel_world_size()
        self.head_dim = config.head_dim
        num_heads = config.num_heads // world
        num_kv_heads = max(1, config.num_kv_heads // world)
        self.sizes = [num_heads * config.head_dim, *[num_kv_heads * config.head_dim] * 2]
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = QKVParallelLinear(
            hidden,
            config.head_dim,
            config.num_heads,
            config.num_kv_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * config.head_dim, hidden, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        sizes = [config.intermediate_size] * 2
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, sizes, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, hidden, bias=False, prefix=f"{prefix}.down_proj"
        )
        self.attn = Attention(
            num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def context_keys_values(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """context [A, H] -> keys and values, each [A, KV heads, D]."""
        # The whole projection, because vLLM may have packed the weight, on a CPU for instance.
        _, key, value = self.qkv_proj(context)[0].split(self.sizes, dim=-1)
        return self._rotated(key, rotary), value.unflatten(-1, (-1, self.head_dim)).contiguous()

    def forward(self, frames: Tensor, rotary: Rotary) -> Tensor:
        """frames [R, H] of all sequences, whose context is in the cache already -> [R, H]."""
        projected, _ = self.qkv_proj(self.input_norm(frames))
        query, key, value = projected.split(self.sizes, dim=-1)
        attended = self.attn(
            self._rotated(query, rotary).flatten(1), self._rotated(key, rotary).flatten(1), value.contiguous()
        )
        frames = frames + self.o_proj(attended)[0]
        gate, up = self.gate_up_proj(self.post_norm(frames))[0].chunk(2, dim=-1)
        return frames + self.down_proj(F.silu(gate) * up)[0]

    def _rotated(self, projected: Tensor, rotary: Rotary) -> Tensor:
        """[R, heads * D] -> [R, heads, D]."""
        heads = projected.unflatten(-1, (-1, self.head_dim)).transpose(0, 1).unsqueeze(0)
        return rotate(heads, *rotary).squeeze(0).transpose(0, 1).contiguous()
