"""The attention trunks of the ``ctc`` and ``block`` heads.

T frames attend to the target model's hidden states, projected, and to each other: the draft module of
CTC-drafter (Wen, Gui, Feng: "Speculative Decoding with CTC-based Draft Model", 2024) and, without a
blank, a block drafter in the manner of DFlash (arXiv 2602.06036). There, a frame begins as a learned
query, and the anchor token's embedding e is added to the first (``frame_start = "anchor"``). In a single
layer the later frames then look for the same things in every context, and know the anchor only through
attention. ``fused`` frames begin from the anchor and the last context token c:

    x_t = q_t + e + c + W_t silu(W [norm(e), c])

The trunk ``dspark`` has exactly the form of DSpark (arXiv 2607.05147), so that engines which know that form
load a ``block`` head without a plug-in (``export.draft_directory``): the frames after the first begin as the
embedding of a mask token of the target model, the context is projected before it is normed, and queries and
keys are normed in every head, as in Qwen3.

With an ``attention_window`` of W, a frame at position p sees the positions from p - W + 1 on, as in models
with sliding windows. A head that was trained on short texts keeps its acceptance in long ones that way.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.features import ContextProjection
from drafters.layers import (
    AttentionFunction,
    DraftLayer,
    KeyValueCache,
    RMSNorm,
    RotaryEmbedding,
    scaled_dot_product,
)
from drafters.parallel import ParallelDrafter, last_context


class FusedStart(nn.Module):
    """What is added to the queries of T frames: a function of the anchor and the context token before it."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.start_size or config.hidden_size
        self.num_frames = config.num_frames
        self.anchor_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.fuse = nn.Linear(2 * hidden, size, bias=False)
        self.spread = nn.Linear(size, config.num_frames * hidden, bias=False)
        nn.init.zeros_(self.spread.weight)

    def forward(self, anchors: Tensor, last: Tensor, count: int) -> Tensor:
        """Embedded anchors and projected context tokens, each [B, M, H] -> [B, M, count, H]."""
        both = torch.cat((self.anchor_norm(anchors), last), dim=-1)
        own = self.spread(F.silu(self.fuse(both))).unflatten(-1, (self.num_frames, -1))
        start: Tensor = (anchors + last).unsqueeze(2) + own[:, :, :count]
        return start


class AttentionTrunk(ParallelDrafter, ABC):
    """Frames that attend to the context and to each other; a subclass says what they begin as.

    feature_norms: whether the context's features are normed layer by layer before they are projected
    head_norms: whether queries and keys are normed in every head
    """

    feature_norms = True
    head_norms = False

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.context = ContextProjection(config, feature_norms=self.feature_norms)
        self.add_starts(config)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.window = config.attention_window
        self.layers = nn.ModuleList(
            DraftLayer(config, layer, head_norms=self.head_norms) for layer in range(config.num_layers)
        )

    def add_starts(self, config: DrafterConfig) -> None:
        """Add the modules of ``starts``, before the layers: a seed's first weights depend on the order."""

    @abstractmethod
    def starts(
        self, anchors: Tensor, context: Tensor, context_position_ids: Tensor, positions: Tensor
    ) -> Tensor:
        """What frames begin as, [B, M, T, H].

        anchors: embedded anchor tokens [B, M, H]; context: projected context tokens [B, A, H]
        context_position_ids, positions: of the context [B, A] and of the frames [B, M, T]
        """

    def forward(
        self,
        features: Tensor,
        context_position_ids: Tensor,
        anchor_ids: Tensor | None,
        frame_position_ids: Tensor,
        attn_mask: Tensor | None,
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> Tensor:
        """With a ``cache``, the keys and values of context and frames are kept in it.

        ``frame_position_ids`` may have the positions of the first frames alone; only those are drafted.
        """
        assert anchor_ids is not None
        assert attn_mask is not None
        context = self.context(features)
        positions = frame_position_ids.unflatten(1, (anchor_ids.shape[1], -1))  # [B, M, T]
        starts = self.starts(self.embed(anchor_ids), context, context_position_ids, positions)
        frames = starts.flatten(1, 2)

        key_positions = torch.cat((context_position_ids, frame_position_ids), dim=1)
        if self.window is not None:
            seen = key_positions
            if cache is not None:  # a key lies at its position
                seen = torch.arange(attn_mask.shape[-1], device=attn_mask.device)
            distance = frame_position_ids.unsqueeze(-1) - seen.unsqueeze(-2)  # [B, M*T, S]
            attn_mask = attn_mask & (distance < self.window).unsqueeze(1)
        key_rotary = self.rotary(key_positions)
        query_rotary = self.rotary(frame_position_ids)
        for layer in self.layers:
            frames = layer(frames, context, key_rotary, query_rotary, attn_mask, cache, attend)
        hidden: Tensor = self.norm(frames)
        return hidden


class AttentionFrames(AttentionTrunk):
    """Frames that begin as learned queries, with the anchor token in the first or in all of them."""

    def add_starts(self, config: DrafterConfig) -> None:
        self.frame_queries = nn.Parameter(torch.randn(config.num_frames, config.hidden_size) * 0.02)
        self.start = FusedStart(config) if config.frame_start == "fused" else None

    def starts(
        self, anchors: Tensor, context: Tensor, context_position_ids: Tensor, positions: Tensor
    ) -> Tensor:
        count = positions.shape[2]
        if self.start is None:
            starts = F.pad(anchors.unsqueeze(2), (0, 0, 0, count - 1))
        else:
            last = last_context(context, context_position_ids, positions[:, :, 0])
            starts = self.start(anchors, last, count)
        return starts + self.frame_queries[:count]


class DSparkFrames(AttentionTrunk):
    """Frames of which the first begins as the anchor token and the others as the mask token."""

    feature_norms = False
    head_norms = True

    def starts(
        self, anchors: Tensor, context: Tensor, context_position_ids: Tensor, positions: Tensor
    ) -> Tensor:
        mask = self.embed_tokens[self.config.mask_token_id].to(anchors.dtype)
        masks = mask.expand(*positions.shape[:2], positions.shape[2] - 1, -1)
        return torch.cat((anchors.unsqueeze(2), masks), dim=2)
