"""A draft head between vLLM's embedding, LM head and cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from drafters.attention import FusedStart
from drafters.config import DrafterConfig
from drafters.features import ContextProjection
from drafters.layers import RMSNorm, RotaryEmbedding
from integrations.vllm.last_context import LastContext, slots_before
from integrations.vllm.layers import FrameLayer


class Tables(nn.Module):
    """The transition of ``drafters.transition``, of which labels' vectors are tabulated by the export.

    The tables are split by the vocabulary among devices, as the embedding is.
    """

    def __init__(self, config: DrafterConfig, *, prefix: str):
        super().__init__()
        size = config.transition_size
        self.previous = VocabParallelEmbedding(config.vocab_size, size, prefix=f"{prefix}.previous")
        self.following = VocabParallelEmbedding(config.vocab_size, size, prefix=f"{prefix}.following")
        self.frame = nn.Linear(config.hidden_size, size, bias=False) if config.transition == "mlp" else None
        self.blank = nn.Parameter(torch.zeros(size), requires_grad=False) if config.has_blank else None

    def of_frames(self, hidden: Tensor) -> Tensor | None:
        """As ``Transition.of_frames``, in float32."""
        return None if self.frame is None else self.frame(hidden).float()

    def of_previous(self, label_ids: Tensor, embed_tokens: object) -> Tensor:
        """As ``Transition.of_previous``, in float32."""
        return self._look_up(self.previous, label_ids)

    def of_following(self, label_ids: Tensor, lm_head: object) -> Tensor:
        """As ``Transition.of_following``, in float32."""
        vectors = self._look_up(self.following, label_ids)
        if self.blank is None:
            return vectors
        blank = self.blank.float().expand(*vectors.shape[:-2], 1, -1)
        return torch.cat((vectors, blank), dim=-2)

    def _look_up(self, table: nn.Module, label_ids: Tensor) -> Tensor:
        found: Tensor = table(label_ids.flatten())
        return found.view(*label_ids.shape, -1).float()


class Frames(nn.Module):
    """``drafters.attention.AttentionFrames`` for the sequences of a batch, T frames each.

    vllm_config: vLLM's; first_layer: the number of the first layer, behind those of the target model
    """

    def __init__(self, config: DrafterConfig, vllm_config: Any, *, first_layer: int, prefix: str):
        super().__init__()
        hidden, scheduler = config.hidden_size, vllm_config.scheduler_config
        self.vllm_config = vllm_config
        self.num_frames = 1 + vllm_config.speculative_config.num_speculative_tokens
        # vLLM replaces it with the target model's.
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden, prefix=f"{prefix}.embed_tokens")
        self.context = ContextProjection(config)
        self.start = FusedStart(config) if config.frame_start == "fused" else None
        self.frame_queries = nn.Parameter(torch.zeros(config.num_frames, hidden), requires_grad=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        cache = vllm_config.cache_config
        self.frame_layers = [
            FrameLayer(config, prefix=f"{prefix}.layers.{first_layer + layer}", cache_config=cache)
            for layer in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self.frame_layers)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.blank = nn.Linear(hidden, 1) if config.has_blank else None
        self.tables = Tables(config, prefix=f"{prefix}.tables") if config.transition != "none" else None
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
        if self.start is None:
            starts = F.pad(anchors.unsqueeze(1), (0, 0, 0, frames - 1))
        else:
            last = self.last_context.find(self._slots_before(positions[::frames]))
            starts = self.start(anchors.unsqueeze(0), last.unsqueeze(0), frames).squeeze(0)
        hidden = (starts + self.frame_queries[:frames]).flatten(0, 1)[:count].to(anchors.dtype)
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
