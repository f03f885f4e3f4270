"""The model behind vLLM's method ``dflash`` that drafts with a head of ours.

vLLM hands over the target model's hidden states of the chosen layers and asks, for every sequence, for one
pass over the anchor and N mask tokens. Those are the head's first N + 1 frames. The pass ends with a search
over their lattice, whose chain of N drafts is the pass's output.

Fused frames begin from the context token before each anchor, which ``LastContext`` finds. vLLM hands a draft
model the context of a step without saying where a sequence's part of it ends: some of the rows that a step
verified were rejected. Every row comes with the slot of its key and value, and a sequence's last accepted row
has the slot of the position before the anchor.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from drafters.config import DrafterConfig
from drafters.layers import Rotary
from integrations.draft_directory import DraftError, DraftSettings, model_problem
from integrations.frames import HeadParts, Projections, ShardedLayer, load_sharded
from integrations.vllm.plugin import serving_problem

PROJECTIONS = Projections(QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear)
# Stands for the slot of a row that has not been written.
NO_SLOT = -1


class FrameLayer(ShardedLayer):
    """A layer with vLLM's cache and attention.

    prefix: vLLM finds the layer's cache by it; cache_config: vLLM's
    """

    def __init__(self, config: DrafterConfig, *, prefix: str, cache_config: object):
        super().__init__(config, PROJECTIONS, world=get_tensor_model_parallel_world_size(), prefix=prefix)
        self.attn = Attention(
            self.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
        )

    def context_keys_values(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """context [A, H] -> keys and values, each [A, KV heads, D]."""
        # The query is computed too: vLLM may have packed the weight, on a CPU for instance.
        _, key, value = self.project(context)
        return self.rotated(key, rotary), value.unflatten(-1, (-1, self.head_dim)).contiguous()


class LastContext(nn.Module):
    """The rows of a step's context: rows [C, H] and their slots [C] int64."""

    rows: Tensor
    slots: Tensor

    def __init__(self, capacity: int, hidden_size: int):
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, hidden_size), persistent=False)
        self.register_buffer("slots", torch.full((capacity,), NO_SLOT, dtype=torch.int64), persistent=False)

    def store(self, states: Tensor, slots: Tensor) -> None:
        """Keep context rows [A, H] and their slots [A].

        A step may come in two parts, which are slices of one tensor, the later rows first; so rows are kept
        at the places that they have in their tensor.
        """
        start = states.storage_offset() // states.shape[1]
        end = start + states.shape[0]
        self.rows[start:end] = states
        self.slots[start:end] = slots

    def find(self, wanted: Tensor) -> Tensor:
        """The rows [R, H] with these slots [R]. For a slot that no row has, it is any row.

        Rows of earlier steps stand behind those of this one, so the first row with a slot is the newest.
        """
        found = (self.slots == wanted.unsqueeze(1)).to(torch.uint8).argmax(1)
        return self.rows[found]


def slots_before(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """The slots [R] of the positions before these [R], both int64.

    block_table: [R' >= 1, blocks] integers, the blocks of each sequence; behind its R' sequences the last one
        stands for padding
    """
    before = (positions - 1).clamp(min=0)
    sequence = torch.arange(positions.shape[0], device=positions.device).clamp(max=block_table.shape[0] - 1)
    column = (before // block_size).clamp(max=block_table.shape[1] - 1)
    return block_table[sequence, column].long() * block_size + before % block_size


class Frames(HeadParts):
    """``drafters.attention.AttentionFrames`` for the sequences of a batch, T frames each.

    vllm_config: vLLM's; first_layer: the number of the first layer, behind those of the target model
    """

    def __init__(self, config: DrafterConfig, vllm_config: Any, *, first_layer: int, prefix: str):
        def make_table(tokens: int, width: int, name: str) -> nn.Module:
            # Split by the vocabulary among devices, as the embedding is.
            table: nn.Module = VocabParallelEmbedding(tokens, width, prefix=f"{prefix}.tables.{name}")
            return table

        super().__init__(config, make_table)
        hidden, scheduler = config.hidden_size, vllm_config.scheduler_config
        self.vllm_config = vllm_config
        self.num_frames = 1 + vllm_config.speculative_config.num_speculative_tokens
        # vLLM replaces it with the target model's.
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, prefix=f"{prefix}.embed_tokens")
        cache = vllm_config.cache_config
        self.frame_layers = [
            FrameLayer(config, prefix=f"{prefix}.layers.{first_layer + layer}", cache_config=cache)
            for layer in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self.frame_layers)
        rows = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * self.num_frames
        self.last_context = LastContext(rows, hidden)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """input_ids [R] -> [R, H]."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def store_context(self, context: Tensor, positions: Tensor, slots: Tensor | list[Tensor | None]) -> None:
        """Write projected context [A, H] at these positions [A] into the cache.

        slots: [A], or one for every layer; None where nothing is to be written
        """
        own = slots if isinstance(slots, list) else [slots] * len(self.frame_layers)
        if own[0] is not None and self.start is not None:
            self.last_context.store(context, own[0])
        rotary = self.rotary(positions.unsqueeze(0))
        for layer, where in zip(self.frame_layers, own, strict=True):
            key, value = layer.context_keys_values(context, rotary)
            if where is not None:
                attn = layer.attn
                attn.impl.do_kv_cache_update(attn, key, value, attn.kv_cache, where)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Frames' hidden states [R, H]; input_ids, positions [R] int64: each sequence's anchor, then masks.

        Behind the sequences there may be padding, and not always for whole sequences.
        """
        count, frames = input_ids.shape[0], self.num_frames
        anchors = self.embed_tokens(input_ids[::frames])  # [sequences, H]
        last = None
        if self.start is not None:
            last = self.last_context.find(self._slots_before(positions[::frames]))
        hidden = self.begin(anchors, last, frames).flatten(0, 1)[:count]
        rotary = self.rotary(positions.unsqueeze(0))
        for layer in self.frame_layers:
            hidden = layer(hidden, rotary)
        normed: Tensor = self.norm(hidden)
        return normed

    def _slots_before(self, positions: Tensor) -> Tensor:
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        if not metadata:  # a pass that measures memory
            return torch.zeros_like(positions)
        table = getattr(metadata[self.frame_layers[0].attn.layer_name], "block_table", None)
        if table is None:
            raise NotImplementedError(
                "attention backend: expected one whose metadata has a block_table, which fused frames read"
            )
        return slots_before(positions, table, self.vllm_config.cache_config.block_size)


class DFlashCTCForCausalLM(DFlashQwen3ForCausalLM):
    """A ``ctc`` or ``block`` head.

    vLLM asks whether the class derives from its own; nothing else of the base class is used.

    Raises DraftError for a head that does not fit the target model or what is asked of it.
    """

    has_own_embed_tokens = False
    has_own_lm_head = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        nn.Module.__init__(self)
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        self.draft_model_config = speculative.draft_model_config
        self.config = self.draft_model_config.hf_config
        settings = DraftSettings.read(self.config, self.draft_model_config.model)
        self.head_config, self.top_k = settings.head, settings.top_k
        # While a draft model is built, ``model_config`` may be its own.
        target = speculative.target_model_config or model
        problem = model_problem(
            self.head_config,
            vocab_size=target.get_vocab_size(),
            hidden_size=target.get_hidden_size(),
            num_layers=target.get_total_num_hidden_layers(),
        ) or serving_problem(self.head_config, speculative, vllm_config.parallel_config)
        if problem:
            raise DraftError(f"{self.draft_model_config.model}: {problem}")
        self.num_drafts = speculative.num_speculative_tokens
        self.model = Frames(
            self.head_config,
            vllm_config,
            first_layer=target.get_total_num_hidden_layers(),
            prefix=f"{prefix}.model" if prefix else "model",
        )
        # vLLM replaces it with the target model's.
        self.lm_head = ParallelLMHead(
            self.head_config.vocab_size, self.head_config.hidden_size, prefix=f"{prefix}.lm_head"
        )
        self.logits_processor = LogitsProcessor(self.head_config.vocab_size)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """Features [A, F*H] -> context [A, H]."""
        context: Tensor = self.model.context(hidden_states)
        return context

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Any = None,
    ) -> None:
        """Write new context into the head's cache; without slots nothing is written."""
        self.model.store_context(context_states, context_positions, context_slot_mapping)

    def forward(self, input_ids: Tensor, positions: Tensor, inputs_embeds: Tensor | None = None) -> Tensor:
        """The drafts [R, 1] int64, each in the row of its mask token; an anchor's row means nothing."""
        rows, frames = input_ids.shape[0], self.num_drafts + 1
        hidden = self.model(input_ids, positions)
        anchors = input_ids[::frames]
        hidden = F.pad(hidden, (0, 0, 0, anchors.shape[0] * frames - rows)).unflatten(0, (-1, frames))
        drafts = self.model.chains(
            hidden, anchors, self._token_logits, top_k=self.top_k, num_drafts=self.num_drafts
        )
        return F.pad(drafts, (1, 0)).flatten()[:rows].unsqueeze(1)

    def get_top_tokens(self, hidden_states: Tensor) -> Tensor:
        """The drafts that the pass has found: [R, 1] -> [R]."""
        return hidden_states.squeeze(1)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        raise NotImplementedError("use_local_argmax_reduction: expected true; a chain has no logits")

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        return [layer.attn.layer_name for layer in self.model.frame_layers]

    def get_draft_attn_causal(self) -> list[bool]:
        return [False] * len(self.model.frame_layers)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take a draft directory's weights. Raises DraftError for one that is missing, or not the head's."""
        own = dict(self.model.named_parameters())
        # The embedding is the target model's.
        written = {name: value for name, value in own.items() if name != "embed_tokens.weight"}
        load_sharded(written, weights, default_weight_loader)
        return {f"model.{name}" for name in own} | {"lm_head.weight"}

    def _token_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.logits_processor(self.lm_head, hidden)
        return logits
