"""The parts of SGLang around a draft model, for one device: so much that a draft model and the hooks run.

``test_source`` compares what is assumed here with SGLang's sources, where there is a copy of them.
"""

import importlib
import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Drafter
from tests.integrations.vllm.fake_vllm import Rows, columns, default_weight_loader, qkv

VERSION = "0.5.23"
RESIDUAL = "sglang.srt.layers.layer_boundary.residual"
PARALLEL = SimpleNamespace(tp_size=1, attn_dp_enabled=False)
GRAPH = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=[1, 8])))


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class HookType(Enum):
    BEFORE = "before"
    AROUND = "around"


@dataclass
class Output:
    """As LogitsProcessorOutput."""

    next_token_logits: Tensor | None
    hidden_states: Tensor


class RadixAttention(nn.Module):
    """Every query sees its request's text and block, in one pool [slots, 2, KV heads, D]."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        attn_type: AttentionType = AttentionType.DECODER,
    ):
        super().__init__()
        assert attn_type is AttentionType.ENCODER_ONLY
        self.shape = (num_heads, num_kv_heads, head_dim)
        self.k_scale = self.v_scale = None
        self.pool = torch.zeros(640, 2, num_kv_heads, head_dim)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        _, kv_heads, dim = self.shape
        self.pool[slots] = torch.stack([x.reshape(-1, kv_heads, dim) for x in (key, value)], dim=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any) -> Tensor:
        heads, _, dim = self.shape
        self.write(batch.out_cache_loc, key, value)
        found = []
        block = len(query) // len(batch.seq_lens)
        for queries, request, length in zip(
            query.split(block), batch.req_pool_indices, batch.seq_lens, strict=True
        ):
            keys, values = self.pool[batch.req_to_token[request, : length + block]].permute(1, 2, 0, 3)
            rows = queries.unflatten(-1, (heads, dim)).transpose(0, 1)
            out = F.scaled_dot_product_attention(rows[None], keys[None], values[None], enable_gqa=True)
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


class DFlashWorkerV2:
    """Drafts blocks and writes contexts; ``uses_graphs`` as if passes were captured."""

    def __init__(self, draft_model: Any, head: Drafter, block_size: int, *, uses_graphs: bool):
        config = head.config
        self.draft_model, self.block_size, self.uses_graphs = draft_model, block_size, uses_graphs
        self.device = "cpu"
        # Places of requests, each with positions in slots that no other has.
        slots = torch.randperm(240, generator=torch.Generator().manual_seed(3))
        self.req_to_token = slots.view(6, 40)
        self.embed_tokens = head.embed_tokens
        lm_head = nn.Module()
        # SGLang's LM head may have rows that only pad it.
        lm_head.weight = nn.Parameter(F.pad(head.lm_head, (0, 0, 0, 4), value=9.0), requires_grad=False)
        lm_head.shard_indices = SimpleNamespace(num_added_elements=0)  # type: ignore[assignment]
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(lm_head=lm_head),
            model_config=SimpleNamespace(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_hidden_layers=config.base_num_layers,
            ),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
        )
        self._draft_sampler: Any = None
        draft_model.set_block_size(block_size)
        assert draft_model.candidate_selector is None
        assert draft_model.lilicorr is None
        assert not draft_model.supports_fused_context_kv

    def init_cuda_graphs(self) -> None:
        if self.uses_graphs:
            self._draft_sampler = self._maybe_build_draft_sampler()

    def init_attention_backends(self) -> None:
        """Nothing, without a GPU."""

    def _maybe_build_draft_sampler(self) -> Any:
        return "the engine's"

    def _can_skip_verify_logits(self, batch: Any, sampling_info: Any) -> bool:
        return True

    def _accept_block(self, **kwargs: Any) -> Any:
        return "the engine's"

    def _greedy_sample_from_vocab_parallel_head(
        self, *, hidden_states: Tensor, lm_head: Any, chunk_size: int = 256
    ) -> Any:
        return "the engine's"

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Tensor | None:
        """The drafts of blocks; of prompts None.

        batch: places of requests [B], seq_lens [B], features of new tokens; of prompts extend_lens [B], of
            blocks the anchors [B] and the numbers of accepted tokens [B]
        """
        if batch.extend_lens is not None:
            positions = torch.cat(
                [
                    torch.arange(start, start + length)
                    for start, length in zip(batch.seq_lens, batch.extend_lens, strict=True)
                ]
            )
            slots = self.req_to_token[batch.req_pool_indices.repeat_interleave(batch.extend_lens), positions]
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=batch.features,
                cache_loc=slots,
                positions=positions,
                extend_lens=batch.extend_lens,
            )
            return None
        ids = torch.zeros(len(batch.anchors), self.block_size, dtype=torch.int64)
        ids[:, 0] = batch.anchors
        positions = batch.seq_lens.unsqueeze(1) + torch.arange(self.block_size)
        slots = self.req_to_token[batch.req_pool_indices.unsqueeze(1), positions]
        forward_batch = SimpleNamespace(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots.flatten(),
            req_to_token=self.req_to_token,
        )
        embedded = F.embedding(ids, self.embed_tokens).flatten(0, 1)
        out = self.draft_model(ids.flatten(), positions.flatten(), forward_batch, input_embeds=embedded)
        count = len(ids) * (self.block_size - 1)
        if self.uses_graphs:
            self._draft_sampler(out.hidden_states, ids.flatten())
            drafts = self._draft_sampler.out[:count]
        else:
            rows = out.hidden_states.view(len(ids), self.block_size, -1)[:, 1:]
            drafts = self._greedy_sample_from_vocab_parallel_head(
                hidden_states=rows.reshape(-1, rows.shape[-1]), lm_head=None
            )
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=batch.features.flatten(0, 1),
            cache_loc=slots.flatten(),
            cache_loc_2d=slots,
            positions=positions.flatten(),
            commit_lens=batch.accepted.int(),
        )
        found: Tensor = drafts.view(len(ids), -1).clone()
        return found

    def _append_target_hidden_to_draft_kv_by_loc(
        self,
        *,
        target_hidden: Tensor,
        cache_loc: Tensor,
        positions: Tensor,
        cache_loc_2d: Tensor | None = None,
        commit_lens: Tensor | None = None,
        extend_lens: Tensor | None = None,
    ) -> None:
        context = self.draft_model.project_target_hidden(target_hidden)
        is_kept = torch.ones_like(cache_loc, dtype=torch.bool)
        if commit_lens is not None:
            is_kept = (torch.arange(self.block_size) < commit_lens.unsqueeze(1)).flatten()
        for layer in self.draft_model.layers:
            attn = layer.self_attn
            key, value = attn.kv_proj_only(self.draft_model.prepare_context_hidden_for_kv(layer, context))
            key = attn.apply_k_rope(positions, attn.apply_k_norm(key))
            key, value = (x.view(-1, attn.num_kv_heads, attn.head_dim)[is_kept] for x in (key, value))
            attn.attn.write(cache_loc[is_kept], key, value)


class Decoder(nn.Module):
    """A decoder that hands over the inputs of layers, as LlamaModel does."""

    def __init__(self, layers: list[Tensor]):
        super().__init__()
        self.outputs, self.layers_to_capture = layers, []  # type: ignore[var-annotated]

    def forward(self, batch: Any = None) -> Any:
        hidden, others = torch.zeros_like(self.outputs[0]), []
        for index, output in enumerate(self.outputs):
            if index in self.layers_to_capture:
                others.append(hidden)
            hidden = output
        normed = sys.modules["sglang.srt.layers.layer_boundary.residual.batch"].final_norm(
            hidden, batch, None
        )
        return (normed, others) if others else normed


class Model(nn.Module):
    def __init__(self, layers: list[Tensor]):
        super().__init__()
        self.model, self.config = Decoder(layers), SimpleNamespace(num_hidden_layers=len(layers))

    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.model.layers_to_capture = [index + 1 for index in layer_ids]


def final_norm(hidden: Tensor, batch: Any, norm: Any, capture: Any = None) -> Tensor:
    if capture is not None:
        capture(hidden)
    return -hidden


def install(
    monkeypatch: pytest.MonkeyPatch, version: str = VERSION, worker: type = DFlashWorkerV2
) -> SimpleNamespace:
    """The fakes in SGLang's place. A hook is applied when it is registered."""
    from tests.integrations.sglang.fake_trees import CONTENTS

    found = SimpleNamespace(models={}, hooks=[])

    def register_model(package: str) -> None:
        module = importlib.import_module(f"{package}.model")
        found.models[module.EntryClass.__name__] = module.EntryClass

    def register_hook(target: str, hook: Any, hook_type: HookType) -> None:
        found.hooks.append(target)
        owner_name, _, name = target.rpartition(".")
        owner: Any = sys.modules.get(owner_name)
        if owner is None:
            module, _, class_name = owner_name.rpartition(".")
            owner = getattr(sys.modules[module], class_name)
        original = getattr(owner, name)
        is_of_class = isinstance(vars(owner).get(name), classmethod)
        original = getattr(original, "__func__", original)

        def around(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        def before(*args: Any, **kwargs: Any) -> Any:
            assert hook(*args, **kwargs) is None
            return original(*args, **kwargs)

        wrapped: Any = around if hook_type is HookType.AROUND else before
        monkeypatch.setattr(owner, name, classmethod(wrapped) if is_of_class else wrapped)

    srt = "sglang.srt"
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        srt: {},
        f"{srt}.distributed": {},
        f"{srt}.distributed.communication_op": {"tensor_model_parallel_all_gather": None},
        f"{srt}.layers": {},
        f"{srt}.layers.layer_boundary": {},
        RESIDUAL: {},
        f"{RESIDUAL}.batch": {"final_norm": final_norm},
        f"{srt}.layers.linear": {
            "MergedColumnParallelLinear": columns,
            "QKVParallelLinear": qkv,
            "RowParallelLinear": Rows,
        },
        f"{srt}.layers.logits_processor": {"LogitsProcessorOutput": Output},
        f"{srt}.layers.radix_attention": {
            "AttentionType": AttentionType,
            "RadixAttention": RadixAttention,
        },
        f"{srt}.model_loader": {},
        f"{srt}.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
        f"{srt}.models": {},
        f"{srt}.models.llama": {
            "LlamaModel": type("LlamaModel", (Decoder,), {}),
            "LlamaForCausalLM": type("LlamaForCausalLM", (Model,), {}),
        },
        f"{srt}.models.qwen3": {
            "Qwen3Model": type("Qwen3Model", (Decoder,), {}),
            "Qwen3ForCausalLM": type("Qwen3ForCausalLM", (Model,), {}),
        },
        f"{srt}.models.registry": {
            "ModelRegistry": SimpleNamespace(
                get_supported_archs=lambda: found.models.keys(), register=register_model
            )
        },
        f"{srt}.plugins": {},
        f"{srt}.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=register_hook),
            "HookType": HookType,
        },
        f"{srt}.runtime_context": {
            "get_parallel": lambda: PARALLEL,
            "get_exec": lambda: SimpleNamespace(graph=GRAPH),
        },
        f"{srt}.speculative": {},
        f"{srt}.speculative.dflash_worker_v2": {"DFlashWorkerV2": type("DFlashWorkerV2", (worker,), {})},
        **CONTENTS,
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "integrations.sglang.model", raising=False)
    monkeypatch.setattr("integrations.draft_directory.Versions.installed", lambda self: version)
    return found


def worker_class() -> Any:
    """The worker, with the hooks that have been registered."""
    return sys.modules["sglang.srt.speculative.dflash_worker_v2"].DFlashWorkerV2


def target_class() -> Any:
    """A target model whose decoder has the hooks that have been registered."""
    llama = sys.modules["sglang.srt.models.llama"]

    class Target(llama.LlamaForCausalLM):  # type: ignore[name-defined]
        def __init__(self, layers: list[Tensor]):
            super().__init__(layers)
            self.model = llama.LlamaModel(layers)

    return Target
