"""Losses against brute force over every frame path, torch's CTC loss, and finite differences."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.head_set import LOSSES
from training.losses import (
    DECAY,
    LOG_ZERO,
    Scores,
    cross_entropy_loss,
    ctc_loss,
    forward_variables,
    prefix_ctc_loss,
    streams_loss,
)

# Both sides work in float64.
BRUTE_FORCE_RTOL = 1e-9
# The weights 0.8^(u-1) are float32.
WEIGHTS_RTOL = 1e-6
FLOAT32_TOL = 2e-5

Case = tuple[Tensor, list[int]]  # logits [T, V+1] or [T, V+1, V+1] float64, targets


@st.composite
def cases(draw: st.DrawFn, *, transition: bool = False) -> Case:
    """Up to 4 frames over up to 3 labels, and up to 3 targets of them, often repeated.

    The blank comes last. With a transition a frame has a row for every label that may be the last
    one before, and one for the anchor, which comes last.
    """
    num_frames, num_words = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    targets = draw(st.lists(st.integers(0, num_words - 1), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = (num_frames, *[num_words + 1] * (2 if transition else 1))
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    return draw(st.sampled_from([0.0, 1.0, 5.0])) * logits, targets


def make_scores(logits: Tensor, targets: Tensor, *, transition: bool = False) -> Scores:
    """A head's output: logits [R, T, V+1], with a transition [R, T, V+1, V+1]; targets [R, U]."""
    log_probs = logits.log_softmax(-1)
    anchor = blank = logits.shape[-1] - 1
    if not transition:
        log_probs = log_probs.unsqueeze(2).expand(-1, -1, blank + 1, -1)
    before = F.pad(targets, (1, 0), value=anchor)  # [R, U+1]
    rows = torch.arange(targets.shape[0]).unsqueeze(1)
    label_logp = log_probs[rows, :, before[:, :-1], targets].transpose(1, 2)
    blank_logp = log_probs[rows, :, before, blank].transpose(1, 2)
    return Scores(label_logp, blank_logp, merges_repeats=not transition)


def brute_force(
    logits: Tensor, targets: list[int], *, transition: bool = False
) -> tuple[list[float], list[float]]:
    """P(the collapsed path starts with the first u targets), u = 1..U, and P(it is them), u = 0..U."""
    num_frames, blank = logits.shape[0], logits.shape[1] - 1
    probs = logits.softmax(-1).tolist()
    prefix, exact = [0.0] * len(targets), [0.0] * (len(targets) + 1)
    for path in itertools.product(range(blank + 1), repeat=num_frames):
        if transition:
            collapsed: list[int] = []
            probability = 1.0
            for frame, label in enumerate(path):
                last = collapsed[-1] if collapsed else blank  # the row of the anchor
                probability *= probs[frame][last][label]
                collapsed += [label] if label != blank else []
        else:
            collapsed = [label for label, _ in itertools.groupby(path) if label != blank]
            probability = math.prod(probs[frame][label] for frame, label in enumerate(path))
        for count in range(len(targets) + 1):
            exact[count] += probability * (collapsed == targets[:count])
            if count:
                prefix[count - 1] += probability * (collapsed[:count] == targets[:count])
    return prefix, exact


def random_batch(
    seed: int, num_frames: int, *, num_labels: int = 4, transition: bool = False
) -> tuple[Tensor, ...]:
    """logits as in ``make_scores``, targets [R, U] of few words, repeats included, and lengths [R]."""
    generator = torch.Generator().manual_seed(seed)
    rows, num_words = 24, 3
    shape = (rows, num_frames, *[num_words + 1] * (2 if transition else 1))
    logits = 2 * torch.randn(shape, generator=generator)
    targets = torch.randint(num_words, (rows, num_labels), generator=generator)
    targets[0] = 0  # a, a, a, a needs seven frames
    lengths = torch.randint(1, num_labels + 1, (rows,), generator=generator)
    lengths[0] = num_labels
    return logits, targets, lengths


@pytest.mark.parametrize("transition", [False, True])
def test_forward_variables_equal_brute_force(transition: bool) -> None:
    @settings(max_examples=100)
    @given(cases(transition=transition))
    def check(case: Case) -> None:
        logits, targets = case
        target_rows = torch.tensor([targets])
        scores = make_scores(logits[None], target_rows, transition=transition)
        for found, expected in zip(
            forward_variables(scores, target_rows),
            brute_force(logits, targets, transition=transition),
            strict=True,
        ):
            torch.testing.assert_close(
                found[0].exp(),
                torch.tensor(expected, dtype=torch.float64),
                rtol=BRUTE_FORCE_RTOL,
                atol=1e-15,
            )

    check()


@pytest.mark.parametrize("transition", [False, True])
def test_prefix_ctc_loss_equals_its_definition(transition: bool) -> None:
    @settings(max_examples=30)
    @given(cases(transition=transition), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        logits, targets = case
        length = data.draw(st.integers(0, len(targets)))
        target_rows = torch.tensor([targets])
        scores = make_scores(logits[None], target_rows, transition=transition)
        loss = prefix_ctc_loss(scores, target_rows, torch.tensor([length]))
        prefix, _ = brute_force(logits, targets, transition=transition)
        expected = -sum(DECAY**u * math.log(p) for u, p in enumerate(prefix[:length]) if p > 0)
        assert loss.item() == pytest.approx(expected, rel=WEIGHTS_RTOL, abs=1e-12)

    check()


def test_without_blanks_every_frame_is_the_next_target() -> None:
    """A block head: the prefix probability is a product, and only the paths of full length end."""
    logits, targets, _ = random_batch(2, num_frames=3, transition=True)
    scores = make_scores(logits, targets, transition=True)
    scores = Scores(scores.label_logp, torch.full_like(scores.blank_logp, LOG_ZERO), merges_repeats=False)
    log_prefix, log_exact = forward_variables(scores, targets)
    expected = scores.label_logp[..., :3].diagonal(dim1=1, dim2=2).cumsum(-1)
    torch.testing.assert_close(log_prefix[:, :3], expected, rtol=FLOAT32_TOL, atol=FLOAT32_TOL)
    torch.testing.assert_close(log_exact[:, 3], expected[:, 2], rtol=FLOAT32_TOL, atol=FLOAT32_TOL)
    assert (log_prefix[:, 3] < LOG_ZERO / 2).all()
    assert (log_exact[:, [0, 1, 2, 4]] < LOG_ZERO / 2).all()


def test_prefix_probability_of_one_repeat() -> None:
    """Where repeats merge, two frames cannot spell "a a"; three can, through a blank in the middle."""
    targets = torch.tensor([[3, 3]])
    for num_frames, merged, unmerged in ((2, 0.0, 1 / 4), (3, 1 / 8, 1 / 2)):
        halves = torch.full((1, num_frames, 3), 0.5, dtype=torch.float64).log()
        for merges_repeats, expected in ((True, merged), (False, unmerged)):
            log_prefix, _ = forward_variables(Scores(halves[..., :2], halves, merges_repeats), targets)
            assert log_prefix[0, 1].exp().item() == pytest.approx(expected)


@pytest.mark.parametrize("num_frames", [1, 3, 5, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_ctc_loss_and_gradient_equal_torch(num_frames: int, seed: int) -> None:
    logits, targets, lengths = random_batch(seed, num_frames)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = ctc_loss(make_scores(ours, targets), targets, lengths)
    expected = F.ctc_loss(
        theirs.log_softmax(-1).transpose(0, 1),
        targets,
        torch.full((len(targets),), num_frames),
        lengths,
        blank=logits.shape[-1] - 1,
        reduction="none",
        zero_infinity=True,
    )
    assert (expected == 0).any() == (num_frames < 7)  # some of these targets do not fit
    torch.testing.assert_close(loss, expected, rtol=FLOAT32_TOL, atol=FLOAT32_TOL)
    weights = torch.linspace(0.5, 2.0, len(targets))
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert theirs.grad is not None
    assert theirs.grad.abs().max() > 0
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=FLOAT32_TOL, atol=FLOAT32_TOL)


@pytest.mark.parametrize("loss", [prefix_ctc_loss, ctc_loss, cross_entropy_loss, streams_loss])
@pytest.mark.parametrize("num_frames", [2, 6])
@pytest.mark.parametrize("transition", [False, True])
def test_gradients_equal_finite_differences(
    loss: Callable[..., Tensor], num_frames: int, transition: bool
) -> None:
    logits, targets, lengths = random_batch(3, num_frames, transition=transition)
    logits, targets, lengths = logits[:6].double().requires_grad_(), targets[:6], lengths[:6]

    def compute(x: Tensor) -> Tensor:
        return loss(make_scores(x, targets, transition=transition), targets, lengths)

    assert torch.autograd.gradcheck(compute, (logits,))


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("transition", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
def test_losses_and_gradients_stay_finite(name: str, transition: bool, scale: float) -> None:
    """Targets longer than the frames, padding rows, and logits that saturate the softmax."""
    for num_frames in (1, 2, 8):
        logits, targets, lengths = random_batch(5, num_frames, transition=transition)
        lengths[1] = 0
        logits = (scale * logits).requires_grad_()
        loss = LOSSES[name](make_scores(logits, targets, transition=transition), targets, lengths)
        loss.mean().backward()
        assert loss.isfinite().all()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


@pytest.mark.parametrize("transition", [False, True])
def test_unreachable_labels_carry_no_loss(transition: bool) -> None:
    """In two frames only the first two of three targets count; a third changes nothing."""
    logits, targets, _ = random_batch(0, num_frames=2, num_labels=3, transition=transition)
    logits, targets = logits[1:2].double(), torch.tensor([[0, 1, 2]])
    scores = make_scores(logits, targets, transition=transition)
    three = prefix_ctc_loss(scores, targets, torch.tensor([3]))
    fewer = make_scores(logits, targets[:, :2], transition=transition)
    two = prefix_ctc_loss(fewer, targets[:, :2], torch.tensor([2]))
    assert three.item() == two.item() > 0
    assert ctc_loss(scores, targets, torch.tensor([3])).item() == 0
    log_prefix, log_exact = forward_variables(scores, targets)
    assert log_prefix[0, 2] < LOG_ZERO / 2
    assert log_exact[0, 3] < LOG_ZERO / 2


@pytest.mark.parametrize(("num_frames", "num_labels"), [(3, 4), (4, 3), (1, 1)])
@pytest.mark.parametrize(
    ("own_loss", "weights"), [(cross_entropy_loss, (1, 0.8, 0.64, 0.512)), (streams_loss, (0.1,) * 4)]
)
def test_losses_of_frames_equal_plain_loops(
    num_frames: int, num_labels: int, own_loss: Callable[..., Tensor], weights: tuple[float, ...]
) -> None:
    logits, targets, lengths = random_batch(7, num_frames, num_labels=num_labels)
    loss = own_loss(make_scores(logits, targets), targets, lengths)
    for row, found in enumerate(loss.tolist()):
        expected = sum(
            weights[t] * F.cross_entropy(logits[row, t], targets[row, t]).item()
            for t in range(min(num_frames, int(lengths[row])))
        )
        assert found == pytest.approx(expected, rel=FLOAT32_TOL)
