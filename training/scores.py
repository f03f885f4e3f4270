"""The scores of the targets, computed from a head's hidden states.

With a share s of soft labels, the log-probability of a target is mixed with the head's expected
log-probability under the target model's own distribution q at that place (knowledge distillation):

    (1 - s) log p(y_u) + s sum over v of q_u(v) log p(v)

For the ``ce`` loss this is the usual distillation loss; in the CTC recursion it makes the labels soft.
A logit is the product of a hidden state and a row of the LM head, so the logit of soft labels is the
product with the expected row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.parallel import ParallelDrafter
from drafters.transition import normaliser
from training.losses import LOG_ZERO, Scores
from training.vocabulary import vocabulary_statistics


@dataclass(frozen=True)
class Targets:
    """R anchors' continuations.

    anchor_ids [R] int64; labels [R, U] int64; lengths [R]: how many labels are real
    """

    anchor_ids: Tensor
    labels: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class SoftTargets:
    """Distributions of the target model, probs [N, V], the row of each target, [R, U], and their share s."""

    probs: Tensor
    rows: Tensor
    share: float


def parallel_scores(
    drafter: ParallelDrafter, hidden: Tensor, targets: Targets, soft: SoftTargets | None = None
) -> Scores:
    """Scores of a parallel head; hidden [R, T, H]."""
    config = drafter.config
    num_anchors, num_frames = hidden.shape[:2]
    num_labels = targets.labels.shape[1]
    count = config.num_candidates if drafter.transition is not None else 0
    weights = drafter.label_weights()
    total, top, candidates = _statistics(hidden, weights, count)  # [R, T], [R, T, K], [R, T, K]
    label_logits = _label_logits(hidden, weights, targets.labels, soft)
    if drafter.blank is None:
        blank_logp = None
    else:
        blank = drafter.blank(hidden).squeeze(-1).float()
        total = torch.logaddexp(total, blank)
        blank_logp = blank - total
    label_logp = label_logits - total.unsqueeze(-1)
    if drafter.transition is not None:
        transition = drafter.transition
        previous = torch.cat((targets.anchor_ids.unsqueeze(1), targets.labels), dim=1)  # [R, U+1]
        right = transition.right(drafter.lm_head)  # [V, r]
        state = transition.state(hidden, previous, drafter.embed_tokens)  # [R, T, U+1, r]
        # For every frame a product of [U+1, r] and [r, K].
        delta = (state @ F.embedding(candidates, right).transpose(-1, -2)).float()  # [R, T, U+1, K]
        blank_delta = None
        blank_vector = transition.blank_vector()
        if blank_vector is not None:
            blank_delta = (state @ blank_vector.to(state.dtype)).float()
        lost = normaliser(top - total.unsqueeze(-1), delta, blank_logp, blank_delta)
        moved = _moved(delta[:, :, :-1], candidates, targets.labels, soft)
        label_logp = label_logp + moved - lost[..., :-1]
        if blank_logp is not None and blank_delta is not None:
            blank_logp = blank_logp.unsqueeze(-1) + blank_delta - lost
    if blank_logp is None:
        blank_logp = label_logp.new_full((1, 1, 1), LOG_ZERO)
    elif blank_logp.dim() == 2:
        blank_logp = blank_logp.unsqueeze(-1)
    return Scores(
        label_logp, blank_logp.expand(num_anchors, num_frames, num_labels + 1), config.merges_repeats
    )


def autoregressive_scores(
    drafter: AutoregressiveDrafter, hidden: Tensor, targets: Targets, soft: SoftTargets | None = None
) -> Scores:
    """Scores of an autoregressive head; of its hidden states [R, T, H], state t predicts target t alone."""
    total, _, _ = vocabulary_statistics(hidden, drafter.lm_head, 0)
    label_logp = _label_logits(hidden, drafter.lm_head, targets.labels, soft) - total.unsqueeze(-1)
    num_anchors, num_steps, num_labels = label_logp.shape
    own = torch.eye(num_steps, num_labels, dtype=torch.bool, device=hidden.device)
    blank_logp = label_logp.new_full((1, 1, 1), LOG_ZERO).expand(num_anchors, num_steps, num_labels + 1)
    return Scores(label_logp.masked_fill(~own, LOG_ZERO), blank_logp, merges_repeats=False)


def _statistics(hidden: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``vocabulary_statistics`` with one LM head, [V, H], or one for every frame, [T, V, H]."""
    if weights.dim() == 2:
        return vocabulary_statistics(hidden, weights, count)
    frames = [vocabulary_statistics(x, w, count) for x, w in zip(hidden.unbind(1), weights, strict=True)]
    total, top, candidates = (torch.stack(part, dim=1) for part in zip(*frames, strict=True))
    return total, top, candidates


def _label_logits(hidden: Tensor, weights: Tensor, labels: Tensor, soft: SoftTargets | None) -> Tensor:
    """Hard, soft or mixed logits of the labels at every frame, [R, T, U] float32."""
    if weights.dim() == 3:
        frames = [
            _label_logits(hidden[:, t : t + 1], weight, labels, soft) for t, weight in enumerate(weights)
        ]
        return torch.cat(frames, dim=1)
    vectors = F.embedding(labels, weights)  # [R, U, H]
    if soft is not None:
        # One product for each distribution, because targets of near anchors have the same one.
        expected = F.embedding(soft.rows, soft.probs @ weights.to(soft.probs.dtype))
        vectors = expected if soft.share == 1 else (1 - soft.share) * vectors + soft.share * expected
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden.float() @ vectors.float().transpose(-1, -2)


def _moved(before: Tensor, candidates: Tensor, labels: Tensor, soft: SoftTargets | None) -> Tensor:
    """What the transition adds to the labels' log-probabilities before they are normalised, [R, T, U].

    before [R, T, U, K]: D after the label before; a target outside the candidates is not moved
    """
    share = 0.0 if soft is None else soft.share
    moved = torch.zeros((), device=before.device)
    if share < 1:
        hit = candidates.unsqueeze(2) == labels[:, None, :, None]  # [R, T, U, K]
        moved = moved + (1 - share) * (before * hit).sum(-1)
    if soft is not None:
        weights = soft.probs[soft.rows[:, None, :, None], candidates.unsqueeze(2)]  # [R, T, U, K]
        moved = moved + share * (before * weights).sum(-1)
    return moved
