"""The base class of parallel drafters, which fill T frames in one pass.

A frame is a distribution over L labels, the tokens that drafts are made of, and, for a CTC head, a blank: its
logits are rows of the target model's frozen LM head and one more row of the head's own. Without a blank,
frame t is the t-th token after the anchor. A transition, where there is one, makes a frame depend on the
label before it.

    features        [B, A, F*H]   float  target model's hidden states of new context tokens
    context_position_ids [B, A]   int64  their positions
    anchor_ids      [B, M]        int64  the last token of each of M anchors, not yet in the context
    frame_position_ids [B, M*T]   int64  anchor position + frame index
    attn_mask       [B, 1, M*T, S] bool  True = attend; S = A + M*T, or the cache's capacity
    ->
    hidden          [B, M*T, H]   float  the input of ``logits`` and of the transition
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.layers import AttentionFunction, KeyValueCache, pick, scaled_dot_product
from drafters.transition import Transition

# The logit of a blank that is certain, which half precision has; its negative is an impossible blank's.
CERTAIN = 1e4


class SilentStart(nn.Module):
    """The blank of a head whose first frame says nothing, and whose other frames all say a label."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Frames [..., T, H], the first of them first -> logits [..., T, 1]."""
        is_first = torch.arange(hidden.shape[-2], device=hidden.device).unsqueeze(-1) == 0
        return torch.where(is_first, CERTAIN, -CERTAIN).to(hidden.dtype).expand(*hidden.shape[:-1], 1)


class ParallelDrafter(Drafter, ABC):
    """Base of the parallel heads; a subclass computes the hidden states in ``forward``."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.blank: nn.Module | None = None
        if config.has_blank:
            self.blank = SilentStart() if config.trunk_type.silent_start else nn.Linear(config.hidden_size, 1)
        self.transition = Transition(config) if config.transition != "none" else None

    @abstractmethod
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
        """Frames' hidden states [B, M*T, H]; arguments as in the module's table."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., T, H] -> [..., T, L], with a blank [..., T, L + 1], its logit last."""
        labels = self.label_logits(hidden)
        return labels if self.blank is None else torch.cat((labels, self.blank(hidden)), dim=-1)

    def label_weights(self) -> Tensor:
        """The draft LM head [L, H]; [T, L, H] where every frame has one of its own."""
        return self.draft_lm_head

    def label_logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., T, H] -> [..., T, L]."""
        return F.linear(hidden, self.draft_lm_head)

    def tabulate(self) -> None:
        super().tabulate()
        if self.transition is not None:
            self.transition.tabulate(self.embed_tokens, self.lm_head)


def last_context(context: Tensor, context_position_ids: Tensor, anchor_positions: Tensor) -> Tensor:
    """The context just before each anchor: context [B, A, H], anchor_positions [B, M] -> [B, M, H].

    The context's positions have to be consecutive.
    """
    index = anchor_positions - context_position_ids[:, :1] - 1
    # A padding anchor may point before the first token.
    return pick(context, index.clamp(min=0))
