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

from training.losses import (
    DECAY,
    LOG_ZERO,
    LOSSES,
    cross_entropy_loss,
    ctc_loss,
    forward_variables,
    gather_log_probs,
    prefix_ctc_loss,
)

# Both sides work in float64.
BRUTE_FORCE_RTOL = 1e-9
# The weights 0.8^(u-1) are float32.
WEIGHTS_RTOL = 1e-6
# gather_log_probs works in float32, whatever it is given.
FLOAT32_TOL = 2e-5

Case = tuple[Tensor, list[int]]  # logits [T, V+1] float64 (the blank is last), targets


@st.composite
def cases(draw: st.DrawFn, min_labels: int = 1) -> Case:
    """Up to 4 frames over up to 3 labels, and up to 3 targets of them, often repeated."""
    num_frames, num_words = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    targets = draw(st.lists(st.integers(0, num_words - 1), min_size=min_labels, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1.0, 5.0]))
    logits = torch.randn(num_frames, num_words + 1, generator=generator, dtype=torch.float64)
    return scale * logits, targets


def columns(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What gather_log_probs gives, in the dtype of the logits."""
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, targets.unsqueeze(1).expand(-1, logits.shape[1], -1)), log_probs[..., -1]


def brute_force(logits: Tensor, targets: list[int]) -> tuple[list[float], list[float]]:
    """P(the collapsed path starts with the first u targets), u = 1..U, and P(it is them), u = 0..U."""
    num_frames, blank = logits.shape[0], logits.shape[1] - 1
    probs = logits.softmax(-1).tolist()
    psi, exact = [0.0] * len(targets), [0.0] * (len(targets) + 1)
    for path in itertools.product(range(blank + 1), repeat=num_frames):
        collapsed = [label for label, _ in itertools.groupby(path) if label != blank]
        probability = math.prod(probs[frame][label] for frame, label in enumerate(path))
        for count in range(len(targets) + 1):
            exact[count] += probability * (collapsed == targets[:count])
            if count:
                psi[count - 1] += probability * (collapsed[:count] == targets[:count])
    return psi, exact


def random_batch(seed: int, num_frames: int, num_words: int = 3, num_labels: int = 4) -> tuple[Tensor, ...]:
    """logits [R, T, V+1], targets [R, U], lengths [R]: every target of few words, repeats included."""
    generator = torch.Generator().manual_seed(seed)
    rows = 24
    logits = 2 * torch.randn(rows, num_frames, num_words + 1, generator=generator)
    targets = torch.randint(num_words, (rows, num_labels), generator=generator)
    targets[0] = 0  # a, a, a, a needs seven frames
    lengths = torch.randint(1, num_labels + 1, (rows,), generator=generator)
    lengths[0] = num_labels
    return logits, targets, lengths


@settings(max_examples=100, deadline=None)
@given(cases())
def test_forward_variables_equal_brute_force(case: Case) -> None:
    logits, targets = case
    target_rows = torch.tensor([targets])
    log_psi, log_exact = forward_variables(*columns(logits[None], target_rows), target_rows)
    psi, exact = brute_force(logits, targets)
    torch.testing.assert_close(
        log_psi[0].exp(), torch.tensor(psi, dtype=torch.float64), rtol=BRUTE_FORCE_RTOL, atol=1e-15
    )
    torch.testing.assert_close(
        log_exact[0].exp(), torch.tensor(exact, dtype=torch.float64), rtol=BRUTE_FORCE_RTOL, atol=1e-15
    )


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_prefix_ctc_loss_equals_its_definition(case: Case, data: st.DataObject) -> None:
    logits, targets = case
    length = data.draw(st.integers(0, len(targets)))
    target_rows = torch.tensor([targets])
    loss = prefix_ctc_loss(*columns(logits[None], target_rows), target_rows, torch.tensor([length]))
    psi, _ = brute_force(logits, targets)
    expected = -sum(DECAY**u * math.log(p) for u, p in enumerate(psi[:length]) if p > 0)
    assert loss.item() == pytest.approx(expected, rel=WEIGHTS_RTOL, abs=1e-12)


def test_prefix_probability_of_one_repeat() -> None:
    """Two frames cannot say "a a"; three can, through a blank in the middle."""
    for num_frames, expected in ((2, 0.0), (3, 1 / 8)):
        halves = torch.full((1, num_frames, 2), 0.5, dtype=torch.float64).log()
        log_psi, _ = forward_variables(halves, halves[..., 0], torch.tensor([[3, 3]]))
        assert log_psi[0, 1].exp().item() == pytest.approx(expected)


@pytest.mark.parametrize("num_frames", [1, 3, 5, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_ctc_loss_and_gradient_equal_torch(num_frames: int, seed: int) -> None:
    logits, targets, lengths = random_batch(seed, num_frames)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = ctc_loss(*gather_log_probs(ours, targets), targets, lengths)
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


@pytest.mark.parametrize("loss", [prefix_ctc_loss, ctc_loss, cross_entropy_loss])
@pytest.mark.parametrize("num_frames", [2, 6])
def test_gradients_equal_finite_differences(loss: Callable[..., Tensor], num_frames: int) -> None:
    logits, targets, lengths = random_batch(3, num_frames)
    logits, targets, lengths = logits[:6].double().requires_grad_(), targets[:6], lengths[:6]
    assert torch.autograd.gradcheck(lambda x: loss(*columns(x, targets), targets, lengths), (logits,))


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
def test_losses_and_gradients_stay_finite(name: str, dtype: torch.dtype, scale: float) -> None:
    """Targets longer than the frames, padding rows, and logits that saturate the softmax."""
    for num_frames in (1, 2, 8):
        logits, targets, lengths = random_batch(5, num_frames)
        lengths[1] = 0
        logits = (scale * logits).to(dtype).requires_grad_()
        loss = LOSSES[name](*gather_log_probs(logits, targets), targets, lengths)
        loss.mean().backward()
        assert loss.isfinite().all()
        assert logits.grad is not None
        assert logits.grad.isfinite().all()


def test_unreachable_labels_carry_no_loss() -> None:
    """In two frames only the first two of three targets count; a third changes nothing."""
    logits = torch.randn(1, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[0, 1, 2]])
    label_logp, blank_logp = columns(logits, targets)
    three = prefix_ctc_loss(label_logp, blank_logp, targets, torch.tensor([3]))
    two = prefix_ctc_loss(label_logp[..., :2], blank_logp, targets[:, :2], torch.tensor([2]))
    assert three.item() == two.item() > 0
    assert ctc_loss(label_logp, blank_logp, targets, torch.tensor([3])).item() == 0
    log_psi, log_exact = forward_variables(label_logp, blank_logp, targets)
    assert log_psi[0, 2] < LOG_ZERO / 2
    assert log_exact[0, 3] < LOG_ZERO / 2


@pytest.mark.parametrize(("num_frames", "num_labels"), [(3, 4), (4, 3), (1, 1)])
def test_cross_entropy_loss_equals_plain_loop(num_frames: int, num_labels: int) -> None:
    logits, targets, lengths = random_batch(7, num_frames, num_labels=num_labels)
    loss = cross_entropy_loss(*gather_log_probs(logits, targets), targets, lengths)
    for row, found in enumerate(loss.tolist()):
        expected = sum(
            0.8**t * F.cross_entropy(logits[row, t], targets[row, t]).item()
            for t in range(min(num_frames, int(lengths[row])))
        )
        assert found == pytest.approx(expected, rel=FLOAT32_TOL)


def test_gather_log_probs_normalises_over_vocabulary_and_blank() -> None:
    logits, targets, _ = random_batch(9, num_frames=3)
    label_logp, blank_logp = gather_log_probs(logits.bfloat16(), targets)
    expected_label, expected_blank = columns(logits.bfloat16().float(), targets)
    assert label_logp.dtype == blank_logp.dtype == torch.float32
    torch.testing.assert_close(label_logp, expected_label)
    torch.testing.assert_close(blank_logp, expected_blank)
