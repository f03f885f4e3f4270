"""The losses of draft heads, computed from the log-probabilities of the targets, and the CTC recursion.

A loss reads the scores of R anchors, with T frames and U target labels each (``Scores``), and

    targets    [R, U]     int64 labels
    lengths    [R]        int64, the number of real labels among the U

and returns one number for every anchor, [R].

A head of speculative streams has an auxiliary loss beside that of its frames. Speculative Streaming (arXiv
2402.11131, equation 5) trains the target model and its streams together:

    - a_0 log p(y_t) - sum over j of a_j log p(y_(t+j)),  a_0 = 1, a_j = 0.1

The sum is the loss ``streams``. The first term, the main stream's loss, is trained in ``shared`` mode only,
because in ``lossless`` mode none of its parameters is trained. The early exit predicts the same token from
the hidden states at layer N - N_s; its gradient reaches only its own adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.parallel import last_context
from drafters.streaming import StreamFrames
from training.data.batches import AnchorBatch, SampledBatch

# Stands for log 0. It is finite, so that no gradient becomes NaN.
LOG_ZERO = -1e30
# The weight of a label, relative to the one before it: a late label matters only if all before it are right.
DECAY = 0.8
# The weights a_j of every stream and a_0 of the main stream, and the weight of the early exit.
STREAM_WEIGHT = 0.1
MAIN_WEIGHT = 1.0
EXIT_WEIGHT = 0.1
# The number of logits that are in memory at once; in float32 they take 64 MB.
BLOCK = 1 << 24


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


def streams_loss(scores: Scores, targets: Tensor, lengths: Tensor) -> Tensor:
    """The loss of speculative streams: frame t predicts target t, and all frames weigh the same."""
    own, _ = own_targets(scores, lengths)
    return -STREAM_WEIGHT * own.sum(-1)


def frames_and_auxiliary_loss(
    head: StreamFrames, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> tuple[Tensor, Tensor]:
    """The frames of all anchors, [B*M, T, H], and the loss of main stream and early exit, a scalar.

    features [B, S, H]. The loss is the mean over the real anchors and the last token of every sequence. A
    last token is never an anchor, because nothing follows it, but it may be the end of a text.
    """
    frames = head.config.num_frames
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    main, hidden = head.main_and_frames(
        features, positions, anchors.frame_position_ids, anchors.anchor_ids, anchors.attn_mask
    )
    ends = (sampled.ends - 1).unsqueeze(1)
    at = torch.cat((anchors.frame_position_ids[:, ::frames], ends), dim=1)
    real = torch.cat((anchors.lengths > 0, ends > 0), dim=1)
    labels = sampled.batch.input_ids.gather(1, at)[real]

    def mean_loss(logits_of: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        before = last_context(states, positions, at)
        return _cross_entropy(logits_of, before[real], labels, head.config.vocab_size).mean()

    loss = EXIT_WEIGHT * mean_loss(head.exit_logits, features)
    if head.config.stream_mode == "shared":
        loss = loss + MAIN_WEIGHT * mean_loss(head.main_logits, main)
    return hidden.unflatten(1, (-1, frames)).flatten(0, 1), loss


def _cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, vocab_size: int
) -> Tensor:
    """hidden [R, H], labels [R] -> [R]. The gradient computes the logits again, so they are not kept."""

    def block(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(hidden).float(), labels, reduction="none")

    rows = max(1, BLOCK // vocab_size)
    parts = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([checkpoint(block, *part, use_reentrant=False) for part in parts])
