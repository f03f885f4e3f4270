"""The parts of vLLM that the plug-in builds on, for one device: so much that a draft model runs without vLLM.

``make vllm-test`` runs the plug-in in vLLM itself.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = SimpleNamespace(attn_metadata=None)


@dataclass
class Metadata:
    """block_table [B, blocks], seq_lens [B]: text and queries together, query_slots [B * T]"""

    block_table: Tensor
    seq_lens: Tensor
    query_slots: Tensor


class Merged(nn.Module):
    """Several projections side by side; a checkpoint's parts come with their shard's name."""

    def __init__(self, sizes: dict[Any, int], inputs: int):
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.empty(sum(sizes.values()), inputs))
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: Tensor, loaded: Tensor, shard: Any) -> None:
        names = list(self.sizes)
        start = sum(self.sizes[name] for name in names[: names.index(shard)])
        parameter.data[start : start + self.sizes[shard]] = loaded

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


def qkv(hidden: int, dim: int, heads: int, kv_heads: int, *, bias: bool, prefix: str) -> Merged:
    return Merged({"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}, hidden)


def columns(hidden: int, sizes: list[int], *, bias: bool, prefix: str) -> Merged:
    return Merged(dict(enumerate(sizes)), hidden)


class Rows(nn.Linear):
    def __init__(self, inputs: int, outputs: int, *, bias: bool, prefix: str):
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class Attention(nn.Module):
    """Every query sees its sequence's text and queries: a paged cache [slots, 2, KV heads, D]."""

    def __init__(
        self, heads: int, dim: int, scale: float, *, num_kv_heads: int, cache_config: Any, prefix: str
    ):
        super().__init__()
        self.shape, self.layer_name = (heads, num_kv_heads, dim), prefix
        self.block_size = cache_config.block_size
        self.kv_cache = torch.zeros(cache_config.num_slots, 2, num_kv_heads, dim)
        self.impl = self

    def do_kv_cache_update(
        self, layer: "Attention", key: Tensor, value: Tensor, cache: Tensor, slots: Tensor
    ) -> None:
        cache[slots] = torch.stack((key, value), dim=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        metadata = CONTEXT.attn_metadata[self.layer_name]
        heads, kv_heads, dim = self.shape
        keys, values = (x.unflatten(-1, (kv_heads, dim)) for x in (key, value))
        self.do_kv_cache_update(self, keys, values, self.kv_cache, metadata.query_slots)
        found = []
        for index, queries in enumerate(query.unflatten(0, (metadata.seq_lens.numel(), -1))):
            positions = torch.arange(int(metadata.seq_lens[index]))
            blocks = metadata.block_table[index, positions // self.block_size]
            cached = self.kv_cache[blocks * self.block_size + positions % self.block_size]
            keys, values = cached.permute(1, 2, 0, 3)
            queries = queries.unflatten(-1, (heads, dim)).transpose(0, 1)
            out = F.scaled_dot_product_attention(queries[None], keys[None], values[None], enable_gqa=True)
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


class Embedding(nn.Module):
    def __init__(self, size: int, width: int, *, prefix: str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class LogitsProcessor:
    def __init__(self, vocab_size: int):
        pass

    def __call__(self, lm_head: Embedding, hidden: Tensor) -> Tensor:
        return F.linear(hidden, lm_head.weight)


def default_weight_loader(parameter: Tensor, loaded: Tensor) -> None:
    parameter.data.copy_(loaded)


def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``model`` of the plug-in, with the fakes in vLLM's place in the test."""
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"VllmConfig": object},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.forward_context": {"get_forward_context": lambda: CONTEXT},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.attention": {"Attention": Attention},
        f"{layers}.linear": {
            "MergedColumnParallelLinear": columns,
            "QKVParallelLinear": qkv,
            "RowParallelLinear": Rows,
        },
        f"{layers}.logits_processor": {"LogitsProcessor": LogitsProcessor},
        f"{layers}.vocab_parallel_embedding": {
            "ParallelLMHead": Embedding,
            "VocabParallelEmbedding": Embedding,
        },
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.qwen3_dflash": {"DFlashQwen3ForCausalLM": nn.Module},
    }
    for module_name, values in contents.items():
        module = ModuleType(module_name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.delitem(sys.modules, "integrations.vllm.model", raising=False)
    return importlib.import_module("integrations.vllm.model")
