"""The small tables that the search on the host reads, made of the frames' hidden states.

``export`` puts this behind a parallel head in its graph, and training evaluates with it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters.config import DrafterConfig
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
