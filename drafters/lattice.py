"""The small tables that the search on the host reads, made of the frames' hidden states.

``export`` puts this behind a parallel head in its graph, and training evaluates with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.layers import pick
from drafters.parallel import ParallelDrafter

# The mass outside a frame's labels is at least this, so that it has a logarithm.
LEAST_REST = 1e-30


@dataclass(frozen=True)
class LatticeTensors:
    """R anchors, T frames, K labels a frame; r is the transition's size.

    frame_tokens [R, T, K] int64, frame_logprobs [R, T, K], best first; blank_logprobs [R, T] or None

    The others are None where the head has no transition. They hold what the formula in
    ``drafters.transition`` needs of the frames and of their labels:

    transition_frames [R, T, r]: of the frames; None for ``markov``
    transition_anchor [R, r]: of the anchor as the label before
    transition_previous [R, T, K, r]: of the frames' labels as the label before
    transition_following [R, T, K, r], with a blank [R, T, K + 1, r]: of the frames' labels as what follows
    """

    frame_tokens: Tensor
    frame_logprobs: Tensor
    blank_logprobs: Tensor | None
    transition_frames: Tensor | None = None
    transition_anchor: Tensor | None = None
    transition_previous: Tensor | None = None
    transition_following: Tensor | None = None

    def previous(self, places: Tensor) -> Tensor | None:
        """Vectors [R, M, r] of labels as the label before; None without a transition.

        places: [R, M] int64, where the labels stand among the frames' labels; T * K for the anchor
        """
        if self.transition_previous is None:
            return None
        assert self.transition_anchor is not None
        tables = (self.transition_previous.flatten(1, 2), self.transition_anchor.unsqueeze(1))
        return pick(torch.cat(tables, dim=1), places)

    def frame(self, index: Tensor) -> "LatticeTensors":
        """The lattice of one frame, index [1] int64, without vectors of labels before."""

        def of_frame(table: Tensor | None) -> Tensor | None:
            return None if table is None else table.index_select(1, index)

        return LatticeTensors(
            self.frame_tokens.index_select(1, index),
            self.frame_logprobs.index_select(1, index),
            of_frame(self.blank_logprobs),
            of_frame(self.transition_frames),
            transition_following=of_frame(self.transition_following),
        )

    def after(self, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """The frames' probabilities after labels: of the labels [R, X, K] and of the blank [R, X].

        previous: [R, M, r], what the method of this name returns. T or M has to be 1, and X is the other one;
            without a transition X is T
        """
        logits = self.frame_logprobs
        width = logits.shape[-1]
        if self.blank_logprobs is not None:
            logits = torch.cat((logits, self.blank_logprobs.unsqueeze(-1)), dim=-1)
        if previous is None:
            probs = logits.exp()
        else:
            following = self.transition_following
            assert following is not None
            if self.transition_frames is not None:
                previous = F.silu(self.transition_frames + previous)
            if following.shape[1] == 1:
                change = previous @ following.squeeze(1).transpose(1, 2)
            else:
                change = (following * previous.unsqueeze(2)).sum(-1)
            probs = probabilities_after(logits, change)
        blank = probs[..., width] if probs.shape[-1] > width else torch.zeros_like(probs[..., 0])
        return probs[..., :width], blank

    def present(self) -> dict[str, Tensor]:
        """The tensors that this head has, by name, in order."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def arrays(self) -> dict[str, Any]:
        """The same as numpy arrays, for the search on the host; float32, because numpy lacks bfloat16."""
        return {
            name: (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
            for name, tensor in self.present().items()
        }


def frame_top_k(config: DrafterConfig, width: int) -> int:
    """Labels of a frame: ``width``, but with a transition at most as many as it may move."""
    return width if config.transition == "none" else min(width, config.num_candidates)


def lattice_tensors(
    head: ParallelDrafter, hidden: Tensor, anchor_ids: Tensor | None, *, width: int
) -> LatticeTensors:
    """hidden [R, T, H], anchor_ids [R] (read by a transition only) -> the head's lattice.

    width: labels a frame, limited as ``frame_top_k`` does
    """
    labels = head.label_logits(hidden).float()
    top, tokens = labels.topk(frame_top_k(head.config, width), dim=-1)
    # Written out, because the largest logit is known: engines spend several passes on a log-sum-exp.
    best = top[..., :1]
    blank_logp = None
    if head.blank is None:
        total = best + (labels - best).exp().sum(-1, keepdim=True).log()
    else:
        blank = head.blank(hidden).float()
        best = torch.maximum(best, blank)
        mass = (labels - best).exp().sum(-1, keepdim=True) + (blank - best).exp()
        total = best + mass.log()
        blank_logp = (blank - total).squeeze(-1)
    top = top - total
    transition = head.transition
    if transition is None:
        return LatticeTensors(tokens, top, blank_logp)
    assert anchor_ids is not None
    return LatticeTensors(
        tokens,
        top,
        blank_logp,
        transition.of_frames(hidden),
        transition.of_previous(anchor_ids, head.embed_tokens),
        transition.of_previous(tokens, head.embed_tokens),
        transition.of_following(tokens, head.lm_head),
    )


def probabilities_after(logits: Tensor, change: Tensor) -> Tensor:
    """Probabilities after a label, normalised again together with the mass outside the candidates.

    logits: [..., K] float32, of candidates and the blank before; change: [..., K], or [..., K - 1] where the
        blank's logit is not moved
    """
    rest = (1.0 - logits.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST)
    if change.shape[-1] < logits.shape[-1]:
        change = torch.cat((change, torch.zeros_like(change[..., :1])), dim=-1)
    logits = logits + change
    # The largest is subtracted, so that nothing overflows and the sum is at least 1.
    best = torch.maximum(logits.amax(-1, keepdim=True), rest.log())
    weights = (logits - best).exp()
    return weights / (weights.sum(-1, keepdim=True) + rest * (-best).exp())
