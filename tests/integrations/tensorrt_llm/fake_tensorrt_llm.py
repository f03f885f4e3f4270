"""The parts of TensorRT-LLM around a draft model, for one device and in float32.

``test_source`` compares what is assumed here with TensorRT-LLM's sources, where there is a copy of them.
"""

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafters.base import Drafter

MODE = SimpleNamespace(name="DFLASH")
VERSION = "1.4.0rc1"


class Embedding(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight)


class LMHead(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight)


class LogitsProcessor(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        lm_head: nn.Module,
        attn_metadata: Any,
        return_context_logits: bool = False,
    ) -> Tensor:
        assert return_context_logits
        logits: Tensor = lm_head(hidden_states)
        return logits.float()


def target_model(head: Drafter) -> nn.Module:
    """What a draft model takes of the target model."""
    target, decoder = nn.Module(), nn.Module()
    decoder.embed_tokens = Embedding(head.embed_tokens)
    target.model, target.lm_head = decoder, LMHead(head.lm_head)
    target.logits_processor = LogitsProcessor()
    return target


def configurations(
    head: Drafter, *, top_k: int, num_drafts: int, pp_size: int = 1, **spec: Any
) -> tuple[Any, Any]:
    """TensorRT-LLM's configurations of the target model and of the draft directory ``draft``."""
    config = head.config
    values = {"speculative_model": "draft", "max_draft_len": num_drafts, "attention_backend": "VANILLA"}
    model_config = SimpleNamespace(
        pretrained_config=SimpleNamespace(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.base_num_layers,
        ),
        spec_config=SimpleNamespace(**{**values, **spec}),
        mapping=SimpleNamespace(pp_size=pp_size),
    )
    settings = {"head": config.to_dict(), "top_k": top_k, "shape": "chain"}
    pretrained = SimpleNamespace(ctc_speculator=settings, architectures=["DFlashCTCForCausalLM"])
    return model_config, SimpleNamespace(pretrained_config=pretrained)


class Worker:
    """Keeps contexts of sequences in an arena and asks a draft model for chains, as ``DFlashWorker`` does."""

    def __init__(self, draft_model: Any, *, num_slots: int, max_context: int, num_drafts: int):
        assert draft_model.dflash_attention_backend == "VANILLA"
        assert num_drafts + 1 <= draft_model.block_size
        assert draft_model.hidden_norm is not None
        draft_model._build_fused_kv_buffers()
        self.draft_model, self.num_drafts, self.max_context = draft_model, num_drafts, max_context
        # The block's own keys could stand behind the longest context.
        size = (
            num_slots + 1,
            draft_model._num_attn_layers,
            max_context + num_drafts + 1,
            draft_model._num_kv_heads,
            draft_model._head_dim,
        )
        self.keys, self.values = (torch.zeros(size, dtype=draft_model.fc.weight.dtype) for _ in range(2))
        self.lengths = torch.zeros(num_slots + 1, dtype=torch.int64)

    def read_prompt(self, slot: int, features: Tensor) -> None:
        """Append a part of a prompt [A, F*H] to a context."""
        start = int(self.lengths[slot])
        end = start + len(features)
        context = self.draft_model.project_target_hidden(features)
        key, value = self.draft_model.precompute_context_kv(context, torch.arange(start, end))
        self.keys[slot, :, start:end] = key.permute(1, 0, 2, 3)
        self.values[slot, :, start:end] = value.permute(1, 0, 2, 3)
        self.lengths[slot] = end

    def step(self, slots: Tensor, features: Tensor, accepted: Tensor, anchors: Tensor) -> Tensor:
        """The drafts [B, K] of sequences in these slots [B].

        features: [B, K + 1, F*H] of the verified tokens, of which the first ``accepted`` [B] were accepted
        anchors: [B], the tokens after these
        """
        model, verified = self.draft_model, self.num_drafts + 1
        starts = self.lengths[slots]
        mask_token = torch.full((1,), model.mask_token_id)
        embedded = model.draft_model_full.model.embed_tokens(torch.cat((anchors, mask_token)))
        block = embedded[-1].repeat(len(slots), verified, 1)
        block[:, 0] = embedded[:-1]
        queries = (starts + accepted).unsqueeze(1) + torch.arange(verified)

        rows = starts.unsqueeze(1) + torch.arange(verified)
        context = model.project_target_hidden(features.flatten(0, 1))
        key, value = model.precompute_context_kv(context, rows.flatten())
        is_accepted = (torch.arange(verified) < accepted.unsqueeze(1)).flatten()[:, None, None, None]
        key.mul_(is_accepted)
        value.mul_(is_accepted)
        columns = rows.clamp(max=self.max_context - 1).flatten()
        places = slots.repeat_interleave(verified)
        self.keys[places, :, columns], self.values[places, :, columns] = key, value
        self.lengths[slots] += accepted

        hidden = model.dflash_forward(
            noise_embedding=block,
            query_positions=queries,
            num_ctx_per_req=self.lengths[slots],
            ctx_k_cache=self.keys,
            ctx_v_cache=self.values,
            ctx_cache_batch_idx=slots,
            ctx_kv_cache=None,
            ctx_page_table=None,
        )
        drafted = hidden.unflatten(0, (len(slots), verified))[:, 1:].flatten(0, 1)
        logits = model.logits_processor(drafted, model.lm_head, None, True)
        assert logits.shape == (len(slots) * self.num_drafts, self.lm_rows)
        found: Tensor = logits.argmax(-1).view(len(slots), -1)
        return found

    @property
    def lm_rows(self) -> int:
        rows: int = self.draft_model.lm_head.weight.shape[0]
        return rows


def install(monkeypatch: pytest.MonkeyPatch, version: str = VERSION) -> dict[str, Callable[..., Any]]:
    """TensorRT-LLM's registry of draft models in place of the package; its contents, by the mode's name."""
    builders: dict[str, Callable[..., Any]] = {MODE.name: lambda *arguments: "built by the engine"}

    def register(mode: Any) -> Callable[[Any], Any]:
        def decorate(builder: Any) -> Any:
            builders[mode.name] = builder
            return builder

        return decorate

    contents: dict[str, dict[str, Any]] = {
        "tensorrt_llm": {},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.models": {},
        "tensorrt_llm._torch.models.modeling_utils": {
            "register_draft_model": register,
            "get_registered_draft_model_builder": lambda mode: builders.get(mode.name),
        },
        "tensorrt_llm._torch.speculative": {},
        "tensorrt_llm._torch.speculative.interface": {
            "SpeculativeDecodingMode": SimpleNamespace(DFLASH=MODE)
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("integrations.draft_directory.Versions.installed", lambda self: version)
    return builders
