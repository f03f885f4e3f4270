"""Losses of a draft head, all on gathered log-probabilities.

A loss sees, for every anchor, T frames and U target labels. Only the targets' columns and the blank
of each frame's distribution matter, so everything works on

    label_logp [R, T, U]  log-probability of target label u at frame t
    blank_logp [R, T]     log-probability of the blank
    targets    [R, U]     int64 labels
    lengths    [R]        int64, how many of the U are real

and returns one loss per anchor, [R].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Stands for log 0: finite, so that no gradient becomes NaN.
LOG_ZERO = -1e30
DECAY = 0.8

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gather_log_probs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The columns a loss needs, normalised over the whole vocabulary and blank.

    logits [R, T, V+1], targets [R, U] -> label_logp [R, T, U], blank_logp [R, T], both float32.
    """
    total = logits.float().logsumexp(-1, keepdim=True)
    columns = targets.unsqueeze(1).expand(-1, logits.shape[1], -1)
    return logits.gather(-1, columns).float() - total, (logits[..., -1:].float() - total).squeeze(-1)


def forward_variables(label_logp: Tensor, blank_logp: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The CTC forward recursion (Graves et al., 2006): log psi [R, U] and log exact [R, U+1].

    psi_u is the probability that the collapsed draft starts with the first u targets: the sum over
    frames of emitting label u for the first time there, after exactly y_1..y_{u-1}. exact_u is the
    probability that all frames collapse to exactly the first u targets. States that end in a blank
    and in the last label are kept apart: a label equal to the one before can only follow a blank.
    """
    rows, num_frames, num_labels = label_logp.shape
    zero = label_logp.new_full((rows, num_labels), LOG_ZERO)
    repeats = F.pad(targets[:, 1:] == targets[:, :-1], (1, 0))
    # State u = 0..U: exactly the first u targets so far.
    ends_blank = torch.cat((label_logp.new_zeros(rows, 1), zero), dim=1)
    ends_label = torch.cat((zero, zero[:, :1]), dim=1)
    emitted = []
    for frame in range(num_frames):
        label = label_logp[:, frame]
        either = torch.logaddexp(ends_blank, ends_label)
        first = label + torch.where(repeats, ends_blank[:, :-1], either[:, :-1])
        emitted.append(first)
        again = label + ends_label[:, 1:]  # merged into the label it repeats
        ends_label = torch.cat((zero[:, :1], torch.logaddexp(first, again)), dim=1)
        ends_blank = either + blank_logp[:, frame, None]
    return torch.stack(emitted).logsumexp(0), torch.logaddexp(ends_blank, ends_label)


def prefix_ctc_loss(label_logp: Tensor, blank_logp: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """- sum over u of 0.8^(u-1) log psi_u: acceptance rewards every prefix, the early ones most.

    Labels that cannot be reached in T frames carry no loss.
    """
    log_psi, _ = forward_variables(label_logp, blank_logp, targets)
    steps = torch.arange(targets.shape[1], device=targets.device)
    keep = (steps < lengths.unsqueeze(1)) & (log_psi > LOG_ZERO / 2)
    return -(log_psi * DECAY**steps).masked_fill(~keep, 0.0).sum(-1)


def ctc_loss(label_logp: Tensor, blank_logp: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """The CTC loss of CTC-drafter: - log P(the frames collapse to exactly the targets).

    Targets that T frames cannot spell cost 0. (torch's own ctc_loss wants the whole normalised
    vocabulary: its gradient is wrong for gathered columns. It is the oracle in the tests.)
    """
    _, log_exact = forward_variables(label_logp, blank_logp, targets)
    loss = -log_exact.gather(1, lengths.unsqueeze(1)).squeeze(1)
    return loss.masked_fill(loss > -LOG_ZERO / 2, 0.0)


def cross_entropy_loss(label_logp: Tensor, blank_logp: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
    """Frame t predicts target t: what a head without CTC is trained with."""
    count = min(label_logp.shape[1], targets.shape[1])
    own = label_logp[:, :count].diagonal(dim1=1, dim2=2)
    steps = torch.arange(count, device=targets.device)
    return -(own * DECAY**steps).masked_fill(steps >= lengths.unsqueeze(1), 0.0).sum(-1)


LOSSES: dict[str, Loss] = {"prefix": prefix_ctc_loss, "ctc": ctc_loss, "ce": cross_entropy_loss}
