"""The CTC recursion and the losses of a draft head, computed from the log-probabilities of the targets.

A loss reads the scores of R anchors, with T frames and U target labels each (``Scores``), and

    targets    [R, U]     int64 labels
    lengths    [R]        int64, the number of real labels among the U

and returns one number for every anchor, [R].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Stands for log 0. It is finite, so that no gradient becomes NaN.
LOG_ZERO = -1e30
# The weight of a label, relative to the one before it: a late label matters only if all before it are right.
DECAY = 0.8


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the targets, float32.

    label_logp [R, T, U]: log-probability of target u at frame t, after target u - 1 (the anchor for u = 0)
    blank_logp [R, T, U+1]: log-probability of the blank at frame t when u targets have been emitted
    merges_repeats: whether a label merges with an equal label of the frame before, as in CTC; otherwise
        each frame emits a blank or one label of its own (the topology of the recurrent neural
        aligner, Sak et al., 2017)
    """

    label_logp: Tensor
    blank_logp: Tensor
    merges_repeats: bool


Loss = Callable[[Scores, Tensor, Tensor], Tensor]


def forward_variables(scores: Scores, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The CTC forward recursion (Graves et al., 2006): log prefix [R, U] and log exact [R, U+1].

    prefix_u, the prefix probability psi of the first u targets, is the probability that the collapsed draft
    starts with them. It is the sum over frames of the probability that label u is first emitted at the frame,
    after exactly y_1..y_{u-1}. exact_u is the probability that all frames collapse to exactly the first u
    targets. If repeats merge, states that end in a blank and states that end in the last label are kept
    apart, because a label equal to the one before can only follow a blank.
    """
    label_logp, blank_logp = scores.label_logp, scores.blank_logp
    rows, num_frames, num_labels = label_logp.shape
    zero = label_logp.new_full((rows, num_labels), LOG_ZERO)
    merged = F.pad(targets[:, 1:] == targets[:, :-1], (1, 0)) if scores.merges_repeats else None
    # State u = 0..U means exactly the first u targets so far. Without merging, ends_blank holds every state.
    ends_blank = torch.cat((label_logp.new_zeros(rows, 1), zero), dim=1)
    ends_label = torch.cat((zero, zero[:, :1]), dim=1)
    emitted = []
    for frame in range(num_frames):
        label, blank = label_logp[:, frame], blank_logp[:, frame]
        if merged is None:
            first = label + ends_blank[:, :-1]
            ends_blank = torch.logaddexp(ends_blank + blank, torch.cat((zero[:, :1], first), dim=1))
        else:
            either = torch.logaddexp(ends_blank, ends_label)
            first = label + torch.where(merged, ends_blank[:, :-1], either[:, :-1])
            again = label + ends_label[:, 1:]  # merged into the label it repeats
            ends_label = torch.cat((zero[:, :1], torch.logaddexp(first, again)), dim=1)
            ends_blank = either + blank
        emitted.append(first)
    return torch.stack(emitted).logsumexp(0), torch.logaddexp(ends_blank, ends_label)


def prefix_ctc_loss(scores: Scores, targets: Tensor, lengths: Tensor) -> Tensor:
    """- sum over u of 0.8^(u-1) log prefix_u: the losses of all prefixes, of which early ones weigh most.

    Labels that T frames cannot reach have no loss.
    """
    log_prefix, _ = forward_variables(scores, targets)
    steps = torch.arange(targets.shape[1], device=targets.device)
    keep = (steps < lengths.unsqueeze(1)) & (log_prefix > LOG_ZERO / 2)
    return -(log_prefix * DECAY**steps).masked_fill(~keep, 0.0).sum(-1)


def ctc_loss(scores: Scores, targets: Tensor, lengths: Tensor) -> Tensor:
    """The CTC loss of CTC-drafter: - log P(the frames collapse to exactly the targets).

    Targets that T frames cannot spell have no loss. (torch's own ctc_loss needs the whole normalised
    vocabulary; for gathered columns its gradient is wrong. The tests compare with it.)
    """
    _, log_exact = forward_variables(scores, targets)
    loss = -log_exact.gather(1, lengths.unsqueeze(1)).squeeze(1)
    return loss.masked_fill(loss > -LOG_ZERO / 2, 0.0)


def cross_entropy_loss(scores: Scores, targets: Tensor, lengths: Tensor) -> Tensor:
    """The loss of a head without blanks: frame t predicts target t, and early targets weigh most."""
    own, steps = own_targets(scores, lengths)
    return -(own * DECAY**steps).sum(-1)


def own_targets(scores: Scores, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of target t at frame t, [R, C], 0 if there is no target; and t, [C]."""
    count = min(scores.label_logp.shape[1:])
    own = scores.label_logp[:, :count].diagonal(dim1=1, dim2=2)
    steps = torch.arange(count, device=lengths.device)
    return own.masked_fill(steps >= lengths.unsqueeze(1), 0.0), steps
