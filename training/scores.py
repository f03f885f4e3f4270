"""The scores of the targets, computed from a head's hidden states.

With a share s of soft labels, the log-probability of a target is mixed with the head's expected
log-probability under the target model's own distribution q at that place (knowledge distillation):

    (1 - s) log p(y_u) + s sum over v of q_u(v) log p(v)

For the ``ce`` loss this is the usual distillation loss; in the CTC recursion it makes the labels soft.
A logit is the product of a hidden state and a row of the LM head, so the logit of soft labels is the
product with the expected row.

The logits over the whole vocabulary are never all in memory. A score needs the log-sum-exp and the best few
labels of each hidden state (``vocabulary_statistics``); the logit of a given label is one product. So the
hidden states go through the LM head a block at a time, and once more when the gradient is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafters.autoregressive import AutoregressiveDrafter
from drafters.parallel import ParallelDrafter
from drafters.transition import normaliser
from training.losses import LOG_ZERO, Scores

# Hidden states of one block. Each block reads the whole LM head: with a vocabulary of 151,936, blocks of
# 6, 64, 256 and 1,152 took 81, 16, 12 and 11 s on two CPU cores. 256 rows of such logits are 156 MB.
BLOCK_ROWS = 256
# On a GPU a block is a dozen launches, so it has as many rows as fit in these bytes of logits.
GPU_BLOCK_BYTES = 2**29


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden.shape[0]
        total = hidden.new_empty(rows, dtype=torch.float32)
        top = hidden.new_empty(rows, count, dtype=torch.float32)
        tokens = torch.empty(rows, count, dtype=torch.long, device=hidden.device)
        for part, logits in _block_logits(hidden, weight):
            if count:
                top[part], tokens[part] = logits.topk(count, dim=-1)
            best = logits.amax(-1, keepdim=True)
            # In place: on a CPU torch.logsumexp took three times as long as the product with the LM head.
            total[part] = logits.sub_(best).exp_().sum(-1).log_() + best.squeeze(-1)
        ctx.save_for_backward(hidden, weight, total, tokens)
        ctx.mark_non_differentiable(tokens)
        return total, top, tokens

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_total: Tensor, grad_top: Tensor, _: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight, total, tokens = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part, logits in _block_logits(hidden, weight):
            probs = logits.sub_(total[part].unsqueeze(-1)).exp_().mul_(grad_total[part].unsqueeze(-1))
            if tokens.shape[1]:
                probs.scatter_add_(1, tokens[part], grad_top[part])
            grad = probs.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _block_logits(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of hidden states with their logits in float32, which may be overwritten.

    Every block has its logits in the same memory.
    """
    size = BLOCK_ROWS
    if hidden.device.type != "cpu":
        size = max(BLOCK_ROWS, GPU_BLOCK_BYTES // (4 * weight.shape[0]))
    buffer = hidden.new_empty(min(size, hidden.shape[0]), weight.shape[0], dtype=torch.float32)
    for start in range(0, hidden.shape[0], size):
        part = slice(start, start + size)
        yield part, buffer[: hidden[part].shape[0]].copy_(F.linear(hidden[part], weight))


def vocabulary_statistics(hidden: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-sum-exp and the best ``count`` of the logits ``hidden @ weight.T``.

    hidden [..., H], weight [V, H] -> total [...] float32, top [..., count] float32, tokens [..., count].
    The products are in autocast's type if it is on. The result is differentiable in both arguments.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(device, enabled=False):
        flat = hidden.flatten(0, -2)
        total, top, tokens = _Statistics.apply(flat, weight, count)
    leading = hidden.shape[:-1]
    return total.view(leading), top.view(*leading, count), tokens.view(*leading, count)


@dataclass(frozen=True)
class Targets:
    """The continuations of R anchors.

    labels [R, U] int64, as rows of the draft LM head; lengths [R], the number of real labels
    previous_ids [R, U + 1] int64: the token before each label, of which the first is the anchor, and the last
        label's token
    """

    previous_ids: Tensor
    labels: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class SoftTargets:
    """Distributions of the target model, probs [N, L]; the row of each target, rows [R, U]; the share s."""

    probs: Tensor
    rows: Tensor
    share: float


def parallel_scores(
    drafter: ParallelDrafter, hidden: Tensor, targets: Targets, soft: SoftTargets | None = None
) -> Scores:
    """Scores of a parallel head, without those of a first frame that says nothing; hidden [R, T, H]."""
    config = drafter.config
    is_silent = config.trunk_type.silent_start
    if is_silent:
        hidden = hidden[:, 1:]
    num_anchors, num_frames = hidden.shape[:2]
    num_labels = targets.labels.shape[1]
    count = config.num_candidates if drafter.transition is not None else 0
    weights = drafter.label_weights()
    total, top, candidates = _statistics(hidden, weights, count)  # [R, T], [R, T, K], [R, T, K]
    label_logits = _label_logits(hidden, weights, targets.labels, soft)
    if drafter.blank is None or is_silent:
        blank_logp = None
    else:
        blank = drafter.blank(hidden).squeeze(-1).float()
        total = torch.logaddexp(total, blank)
        blank_logp = blank - total
    label_logp = label_logits - total.unsqueeze(-1)
    if drafter.transition is not None:
        transition = drafter.transition
        right = transition.right(drafter.draft_lm_head)  # [L, r]
        state = transition.state(hidden, targets.previous_ids, drafter.embed_tokens)  # [R, T, U+1, r]
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
    """Scores of an autoregressive head; hidden [R, T, H], of which state t predicts only target t."""
    total, _, _ = vocabulary_statistics(hidden, drafter.draft_lm_head, 0)
    label_logp = _label_logits(hidden, drafter.draft_lm_head, targets.labels, soft) - total.unsqueeze(-1)
    num_anchors, num_steps, num_labels = label_logp.shape
    own = torch.eye(num_steps, num_labels, dtype=torch.bool, device=hidden.device)
    blank_logp = label_logp.new_full((1, 1, 1), LOG_ZERO).expand(num_anchors, num_steps, num_labels + 1)
    return Scores(label_logp.masked_fill(~own, LOG_ZERO), blank_logp, merges_repeats=False)


def _statistics(hidden: Tensor, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """``vocabulary_statistics`` with one LM head, [L, H], or one for every frame, [T, L, H]."""
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
        # Targets of near anchors have the same distribution, so there is one product for each distribution.
        expected = F.embedding(soft.rows, soft.probs @ weights.to(soft.probs.dtype))
        vectors = expected if soft.share == 1 else (1 - soft.share) * vectors + soft.share * expected
    with torch.autocast(hidden.device.type, enabled=False):
        return hidden.float() @ vectors.float().transpose(-1, -2)


def _moved(before: Tensor, candidates: Tensor, labels: Tensor, soft: SoftTargets | None) -> Tensor:
    """The transition's term in the labels' log-probabilities before they are normalised, [R, T, U].

    before [R, T, U, K]: the delta of each candidate after the label before
    The term is 0 for a target outside the candidates.
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
