"""The lattice of a parallel head: the best labels of every frame, as small tables that a search reads.

The export puts ``lattice_tensors`` behind a parallel head in its graph, and training evaluates with it. The
best chain of a lattice is found here too, in tensors of fixed shape: ``torch.export`` traces it, and a CUDA
graph can capture it. It equals ``chain_search`` of ``runtime.core.prefix_search``, whose words it uses.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.layers import pick
from drafters.parallel import ParallelDrafter

# The mass outside a frame's labels is at least this, so that it has a logarithm.
LEAST_REST = 1e-30
# Stands for a probability of 0 where its logarithm is needed: twelve frames of it do not overflow.
LEAST_KEPT = 1e-26


@dataclass(frozen=True)
class LatticeTensors:
    """R anchors, T frames, K labels a frame; r is the transition's size.

    frame_tokens [R, T, K] int64, frame_logprobs [R, T, K], best first; blank_logprobs [R, T] or None

    The others are None if the head has no transition. They are the vectors of the frames and of their labels
    in the formula of ``drafters.transition``:

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


def lattice_tensors(
    head: ParallelDrafter, hidden: Tensor, anchor_ids: Tensor | None, *, width: int
) -> LatticeTensors:
    """hidden [R, T, H], anchor_ids [R] (read by a transition only) -> the head's lattice.

    Without anchors, the caller of a head with a transition fills in ``transition_anchor``.
    width: labels a frame, limited as ``DrafterConfig.frame_top_k`` does
    """
    labels = head.label_logits(hidden).float()
    top, label_ids = labels.topk(head.config.frame_top_k(width), dim=-1)
    tokens = head.token_ids(label_ids)
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
    return LatticeTensors(
        tokens,
        top,
        blank_logp,
        transition.of_frames(hidden),
        None if anchor_ids is None else transition.of_previous(anchor_ids, head.embed_tokens),
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


def chain_search(lattice: LatticeTensors, *, merges_repeats: bool, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The chains of at most N drafts of R lattices.

    merges_repeats: whether a label that repeats the one of the frame before merges with it
    Returns the tokens [R, N] int64 and the number of drafts [R] int64. Behind its drafts a chain repeats the
    last one; the tokens of a chain without drafts mean nothing.
    """
    tokens = lattice.frame_tokens.flatten(1)  # [R, T * K]
    same = (tokens.unsqueeze(1) == tokens.unsqueeze(2)).float()
    # Nothing is emitted yet, and the root's place is behind all labels'.
    emitted = torch.zeros_like(lattice.frame_logprobs[..., 0])
    starts = torch.ones_like(emitted[:, :1])
    place = torch.full_like(tokens[:, :1], tokens.shape[1])
    token = torch.full_like(tokens[:, :1], -1)
    length = torch.zeros_like(tokens[:, 0])
    chain = []
    for _ in range(num_drafts):
        labels, blank = lattice.after(lattice.previous(place))
        is_last = lattice.frame_tokens == token.unsqueeze(-1)
        repeated = torch.where(is_last, labels, 0.0).sum(-1) if merges_repeats else torch.zeros_like(blank)
        # Of having emitted the prefix before a frame and ended in its label, and in a blank: [R, T] each.
        ends_label = _carried(F.pad(emitted, (1, 0)), repeated)[:, :-1]
        ends_blank = _carried(torch.cat((starts, ends_label * blank), dim=1), blank)[:, :-1]
        emissions = labels * (ends_blank + ends_label).unsqueeze(-1)  # [R, T, K]
        if merges_repeats:
            emissions = torch.where(is_last, labels * ends_blank.unsqueeze(-1), emissions)
        # Of every place the prefix probability of its label as the next draft, in all frames together.
        scores = (same @ emissions.flatten(1).unsqueeze(-1)).squeeze(-1)
        best, chosen = scores.max(dim=1, keepdim=True)
        is_draft = best > 0.0
        place = torch.where(is_draft, chosen, place)
        token = torch.where(is_draft, tokens.gather(1, chosen), token)
        emitted = torch.where(lattice.frame_tokens == token.unsqueeze(-1), emissions, 0.0).sum(-1)
        emitted = torch.where(is_draft, emitted, 0.0)
        starts = torch.zeros_like(starts)
        length = length + is_draft.squeeze(1).long()
        chain.append(token)
    return torch.cat(chain, dim=1), length


def _carried(entered: Tensor, kept: Tensor) -> Tensor:
    """y_0 = entered_0, y_t = entered_t + kept_{t-1} y_{t-1}: entered [R, T + 1], kept [R, T] -> [R, T + 1].

    As one product with the matrix of all that is kept from one place to another.
    """
    total = F.pad(kept.clamp(min=LEAST_KEPT).log().cumsum(-1), (1, 0))
    change = total.unsqueeze(2) - total.unsqueeze(1)
    index = torch.arange(total.shape[1], device=total.device)
    decay = torch.where(index.unsqueeze(1) >= index, change, -torch.inf).exp()
    return (decay @ entered.unsqueeze(-1)).squeeze(-1)
