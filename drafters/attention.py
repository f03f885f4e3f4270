"""The attention trunk of the ``ctc`` and ``block`` heads.

T learned frame queries, the first carrying the anchor token's embedding, attend to the projected
hidden states of the backbone and to each other: the draft module of CTC-drafter (Wen, Gui, Feng:
"Speculative Decoding with CTC-based Draft Model", 2024) and, without a blank, a block drafter in
the manner of DFlash (arXiv 2602.06036).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.context import ContextProjection
from drafters.frames import FrameDrafter
from drafters.layers import (
    AttentionFunction,
    DraftLayer,
    KeyValueCache,
    RotaryEmbedding,
    scaled_dot_product,
)


class AttentionFrames(FrameDrafter):
    """Frames that attend to the context and to each other."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.context = ContextProjection(config)
        self.frame_queries = nn.Parameter(torch.randn(config.num_frames, hidden) * 0.02)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(DraftLayer.of(config, layer) for layer in range(config.num_layers))

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
        """With a ``cache``, the keys and values of context and frames go through it."""
        assert anchor_ids is not None
        assert attn_mask is not None
        context = self.context(features)
        anchors = self.embed(anchor_ids).unsqueeze(2)  # [B, M, 1, H]
        anchors = F.pad(anchors, (0, 0, 0, self.config.num_frames - 1))  # [B, M, T, H]
        frames = (anchors + self.frame_queries).flatten(1, 2)

        row_rotary = self.rotary(torch.cat((context_position_ids, frame_position_ids), dim=1))
        frame_rotary = self.rotary(frame_position_ids)
        for layer in self.layers:
            frames = layer(frames, context, row_rotary, frame_rotary, attn_mask, cache, attend)
        hidden: Tensor = self.norm(frames)
        return hidden
