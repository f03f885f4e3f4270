"""Medusa's heads (Cai et al., arXiv 2401.10774): every frame from the last hidden state alone.

Frame t is ``lm_head_t(h + silu(W_t h))``, where h is the target model's hidden state before the anchor,
after its last norm. W_t starts at zero, so every frame starts as the target model's own prediction. As
published, each frame has an LM head of its own (``own_lm_head``). With a blank this is the linear draft
module of the CTC paper's ablation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import AttentionFunction, KeyValueCache, RMSNorm, scaled_dot_product
from drafters.parallel import ParallelDrafter, last_context


class ResidualFrames(ParallelDrafter):
    """T stacks of residual blocks over one hidden state, without the anchor and without attention."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        frames, hidden = config.num_frames, config.hidden_size
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        # blocks[d][t]: block d of frame t, [H, H], applied as x @ W^T.
        self.blocks = nn.Parameter(torch.zeros(config.head_depth, frames, hidden, hidden))
        self.biases = nn.Parameter(torch.zeros(config.head_depth, frames, hidden))
        self.heads = (
            nn.Parameter(torch.empty(frames, config.label_count, hidden)) if config.own_lm_head else None
        )

    @torch.no_grad()
    def start_from(self, norm_weight: Tensor) -> None:
        super().start_from(norm_weight)
        if self.heads is not None:
            self.heads.copy_(self.draft_lm_head)

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
        """Only the last layer's feature just before each anchor is read."""
        frames = self.config.num_frames
        hidden = features[..., -self.config.hidden_size :]
        last = last_context(hidden, context_position_ids, frame_position_ids[:, ::frames])
        x = self.norm(last).unsqueeze(2)  # [B, M, 1, H]
        x = x.expand(-1, -1, frames, -1)
        for weight, bias in zip(self.blocks, self.biases, strict=True):
            x = x + F.silu(_by_frame(x, weight) + bias)
        return x.flatten(1, 2)

    def label_weights(self) -> Tensor:
        return super().label_weights() if self.heads is None else self.heads

    def label_logits(self, hidden: Tensor) -> Tensor:
        if self.heads is None:
            return super().label_logits(hidden)
        return _by_frame(hidden, self.heads)


def _by_frame(x: Tensor, weights: Tensor) -> Tensor:
    """x [..., T, H], weights [T, G, H] -> [..., T, G]: a matrix for each frame.

    One product a frame, so that an engine can treat it like any other and round its weights, for instance.
    """
    weights = weights.to(x.dtype)
    return torch.cat([F.linear(x[..., t : t + 1, :], weights[t]) for t in range(weights.shape[0])], dim=-2)
