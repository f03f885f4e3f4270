"""The scores of an autoregressive head against a dense computation, and that it learns."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.build import build_drafter
from drafters.config import DrafterConfig
from training.data.batches import Batch, SampledBatch
from training.head_config import HeadConfig
from training.head_set import HeadSet
from training.losses import DECAY, LOG_ZERO, cross_entropy_loss, prefix_ctc_loss
from training.scores import SoftTargets, Targets, autoregressive_scores

VOCAB, HIDDEN, DEPTH, ROWS = 23, 8, 4, 5
TOLERANCE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
CONFIG = DrafterConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=12,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    target_layer_ids=(0, 1),
    base_num_layers=2,
    num_frames=DEPTH,
)
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"drafter_type": "eagle"},
    "hydra": {"drafter_type": "hydra", "num_layers": 0},
    "hydra++": {"drafter_type": "hydra", "num_layers": 1, "head_depth": 2},
}


def make_head(**settings: Any) -> AutoregressiveDrafter:
    torch.manual_seed(2)
    head = build_drafter(dataclasses.replace(CONFIG, **settings))
    assert isinstance(head, AutoregressiveDrafter)
    head.attach_base(torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN))
    head.start_from(torch.ones(HIDDEN))
    return head


def make_targets(num_labels: int) -> Targets:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(VOCAB, (ROWS, num_labels), generator=generator)
    lengths = torch.tensor([num_labels, 1, 2, num_labels, 1]).clamp(max=num_labels)
    return Targets(F.pad(labels, (1, 0)), labels, lengths)


def soft_targets(teacher: Tensor, share: float) -> SoftTargets:
    """teacher [R, U, V]."""
    rows = torch.arange(teacher[..., 0].numel())
    return SoftTargets(teacher.flatten(0, 1), rows.view(teacher.shape[:2]), share)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("num_labels", [3, DEPTH, 6])
def test_a_row_scores_its_own_target(num_labels: int, share: float) -> None:
    head, targets = make_head(**KINDS["hydra"]), make_targets(num_labels)
    steps = min(num_labels, DEPTH)
    hidden = torch.randn(ROWS, steps, HIDDEN, requires_grad=True)
    teacher = torch.randn(ROWS, num_labels, VOCAB).softmax(-1)
    soft = soft_targets(teacher, share) if share else None
    scores = autoregressive_scores(head, hidden, targets, soft)
    assert scores.label_logp.shape == (ROWS, steps, num_labels)
    assert scores.blank_logp.shape == (ROWS, steps, num_labels + 1)
    assert (scores.blank_logp == LOG_ZERO).all()
    assert (scores.label_logp[:, ~torch.eye(steps, num_labels, dtype=torch.bool)] == LOG_ZERO).all()
    assert not scores.merges_repeats

    expected = torch.zeros(ROWS)
    for row in range(ROWS):
        for step in range(steps):
            log_probs = head.logits(hidden[row, step]).log_softmax(-1)
            hard = log_probs[targets.labels[row, step]]
            mixed = (1 - share) * hard + share * (teacher[row, step] * log_probs).sum()
            torch.testing.assert_close(scores.label_logp[row, step, step], mixed, **TOLERANCE)
            if step < targets.lengths[row]:
                expected[row] = expected[row] - DECAY**step * mixed
    loss = cross_entropy_loss(scores, targets.labels, targets.lengths)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    (grad,) = torch.autograd.grad(loss.sum(), hidden, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    torch.testing.assert_close(grad, expected_grad, **TOLERANCE)


def test_the_recursion_over_frames_sees_a_chain() -> None:
    """Every frame emits its own target alone: the prefix probability is the product along the path."""
    head, targets = make_head(**KINDS["hydra"]), make_targets(3)
    scores = autoregressive_scores(head, torch.randn(ROWS, 3, HIDDEN), targets)
    own = scores.label_logp.diagonal(dim1=1, dim2=2)
    loss = prefix_ctc_loss(scores, targets.labels, torch.full((ROWS,), 3))
    expected = -(own.cumsum(-1) * DECAY ** torch.arange(3)).sum(-1)
    torch.testing.assert_close(loss, expected, **TOLERANCE)


def make_sampled() -> tuple[Tensor, SampledBatch]:
    """Sequences that count upwards, with noise for features."""
    torch.manual_seed(0)
    starts = torch.tensor([[3], [11], [6]])
    input_ids = (starts + torch.arange(12)) % VOCAB
    ends = torch.tensor([12, 9, 12])
    mask = (torch.arange(12) < ends.unsqueeze(1)).long()
    positions = torch.tensor([[2, 5, 9], [1, 6, -1], [10, -1, -1]])
    features = torch.randn(3, 12, 2 * HIDDEN)
    return features, SampledBatch(Batch((0, 1, 2), input_ids, mask), positions, ends)


@pytest.mark.parametrize("soft_labels", [0.0, 0.5])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_learns(kind: str, soft_labels: float) -> None:
    features, sampled = make_sampled()
    head = make_head(**KINDS[kind])
    settings = HeadConfig(drafter_type=head.config.drafter_type, num_frames=DEPTH, soft_labels=soft_labels)
    heads = HeadSet([head], (settings,), head.logits)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = heads(features, sampled).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(torch.tensor(losses).isfinite())
    # Of soft labels, which are noise here, only the hard half can be learnt.
    assert losses[-1] < (0.1 if soft_labels == 0 else 0.8) * losses[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_loss_is_the_mean_over_the_real_anchors(kind: str) -> None:
    features, sampled = make_sampled()
    head = make_head(**KINDS[kind])
    for parameter in head.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.3)
    settings = HeadConfig(drafter_type=head.config.drafter_type, num_frames=DEPTH)
    found = HeadSet([head], (settings,), head.logits)(features, sampled)
    losses = []
    for row, column in (sampled.positions >= 0).nonzero().tolist():
        position = int(sampled.positions[row, column])
        ids = sampled.batch.input_ids[row : row + 1, : int(sampled.ends[row])]
        following = ids[0, position + 1 : position + 1 + DEPTH]
        hidden = head.unrolled_hidden(
            features[row : row + 1, : ids.shape[1]], ids, torch.tensor([[position]]), following[None, None]
        )
        entropy = F.cross_entropy(head.logits(hidden[0]), following, reduction="none")
        losses.append((entropy * DECAY ** torch.arange(following.numel())).sum())
    torch.testing.assert_close(found, torch.stack(losses).mean()[None], **TOLERANCE)


def test_missing_anchors_teach_nothing() -> None:
    """Moved targets of a padding anchor, or beyond a sequence's end, leave every gradient as it is."""
    features, sampled = make_sampled()
    gradients = []
    for changed in (False, True):
        if changed:
            sampled.batch.input_ids[1, 9:] = 1  # beyond the end
            features[1, 9:] = 5.0
        for kind in KINDS.values():
            head = make_head(**kind)
            settings = HeadConfig(drafter_type=head.config.drafter_type, num_frames=DEPTH)
            loss = HeadSet([head], (settings,), head.logits)(features, sampled)
            gradients.append(torch.autograd.grad(loss.sum(), list(head.parameters())))
    for before, after in zip(gradients[: len(KINDS)], gradients[len(KINDS) :], strict=True):
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_teacher_alone_is_the_distillation_loss() -> None:
    """With all labels soft the loss is the cross entropy to the target model's distribution (Hydra++)."""
    head, targets = make_head(**KINDS["hydra++"]), make_targets(DEPTH)
    hidden = torch.randn(ROWS, DEPTH, HIDDEN)
    teacher = torch.randn(ROWS, DEPTH, VOCAB).softmax(-1)
    scores = autoregressive_scores(head, hidden, targets, soft_targets(teacher, 1.0))
    loss = cross_entropy_loss(scores, targets.labels, torch.full((ROWS,), DEPTH))
    entropy = F.cross_entropy(head.logits(hidden).flatten(0, 1), teacher.flatten(0, 1), reduction="none")
    expected = (entropy.view(ROWS, DEPTH) * DECAY ** torch.arange(DEPTH)).sum(-1)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
