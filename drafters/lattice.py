"""From frames' hidden states to the small tables that the search on the host works with.

What ``export`` puts behind a frame head in its graph, and what training evaluates with.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.frames import FrameDrafter
from drafters.transition import Transition, normaliser


@dataclass(frozen=True)
class LatticeTensors:
    """R rows, T frames, K labels a frame, P labels that may come before.

    frame_tokens [R, T, K] int64, frame_logprobs [R, T, K], best first; blank_logprobs [R, T] or None
    previous_tokens [R, P] int64: the anchor, then the best labels of every frame but the last
    transition_logprobs [R, P, T, K]: of the frames' labels after each of those; transition_blanks [R, P, T]
    None where the head has no transition (and no blank)
    """

    frame_tokens: Tensor
    frame_logprobs: Tensor
    blank_logprobs: Tensor | None
    previous_tokens: Tensor | None = None
    transition_logprobs: Tensor | None = None
    transition_blanks: Tensor | None = None

    def present(self) -> list[Tensor]:
        """The tensors that this head has, in order."""
        return [tensor for tensor in vars(self).values() if tensor is not None]


def lattice_tensors(
    head: FrameDrafter, hidden: Tensor, anchor_ids: Tensor | None, *, width: int, transition_width: int
) -> LatticeTensors:
    """hidden [R, T, H], anchor_ids [R] (read by a transition only) -> the head's lattice.

    width: labels K of a frame, at most ``num_candidates`` with a transition
    transition_width: labels of a frame that have a row in the transition tables
    """
    labels = head.label_logits(hidden).float()
    # A transition's normaliser needs every candidate, the search only the best.
    count = width if head.transition is None else head.config.num_candidates
    top, tokens = labels.topk(count, dim=-1)
    # By hand, because the best is known: engines spend several passes on a log-sum-exp.
    best = top[..., :1]
    mass = (labels - best).exp().sum(-1, keepdim=True)
    blank_logp = None
    if head.blank is None:
        total = best + mass.log()
    else:
        blank = head.blank(hidden).float()
        total = torch.logaddexp(best + mass.log(), blank)
        blank_logp = (blank - total).squeeze(-1)
    top = top - total
    if head.transition is None:
        return LatticeTensors(tokens, top, blank_logp)
    assert anchor_ids is not None
    earlier = tokens[:, :-1, :transition_width].flatten(1)
    previous = torch.cat((anchor_ids.unsqueeze(1), earlier), dim=1)  # [R, P]
    logp, blanks = _after(head, head.transition, hidden, tokens, top, blank_logp, previous)
    return LatticeTensors(
        tokens[..., :width],
        top[..., :width],
        blank_logp,
        previous,
        logp.transpose(1, 2)[..., :width],
        None if blanks is None else blanks.transpose(1, 2),
    )


def _after(
    head: FrameDrafter,
    transition: Transition,
    hidden: Tensor,
    tokens: Tensor,
    top_logp: Tensor,
    blank_logp: Tensor | None,
    previous: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [R, T, P, K] of the candidates and [R, T, P] of the blank after each label."""
    state = transition.state(hidden, previous, head.embed_tokens)  # [R, T, P, r]
    right = F.embedding(tokens, transition.right(head.lm_head))  # [R, T, K, r]
    delta = (state @ right.transpose(-1, -2)).float()
    blank_delta = None
    blank_vector = transition.blank_vector()
    if blank_vector is not None:
        blank_delta = (state @ blank_vector.to(state.dtype)).float()
    lost = normaliser(top_logp, delta, blank_logp, blank_delta)
    logp = top_logp.unsqueeze(2) + delta - lost.unsqueeze(-1)
    if blank_logp is None or blank_delta is None:
        return logp, None
    return logp, blank_logp.unsqueeze(-1) + blank_delta - lost
