"""The transition's own arithmetic; tests/training/test_scores.py has what heads make of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.config import DrafterConfig
from drafters.transition import Transition, normaliser

VOCAB_SIZE, HIDDEN, FRAMES, SIZE = 11, 6, 3, 4
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def make_transition(kind: str) -> Transition:
    torch.manual_seed(0)
    transition = Transition(
        DrafterConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN,
            intermediate_size=8,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            target_layer_ids=(0,),
            base_num_layers=1,
            num_frames=FRAMES,
            transition=kind,
            transition_size=SIZE,
            num_candidates=5,
        )
    )
    with torch.no_grad():
        for parameter in transition.parameters():
            parameter.add_(torch.randn_like(parameter))
    return transition


def random_frames(scale: float, has_blank: bool, count: int) -> tuple[Tensor, ...]:
    """Log-probabilities [R, T, V (+ 1)] of frames, their best labels, and D [R, T, P, V (+ 1)]."""
    generator = torch.Generator().manual_seed(4)
    width = VOCAB_SIZE + int(has_blank)
    log_probs = (scale * torch.randn(2, FRAMES, width, generator=generator)).log_softmax(-1)
    best = log_probs[..., :VOCAB_SIZE].topk(count, dim=-1).indices
    delta = 3 * torch.randn(2, FRAMES, 4, width, generator=generator)
    return log_probs, best, delta


@pytest.mark.parametrize("count", [1, 4, VOCAB_SIZE])
@pytest.mark.parametrize("has_blank", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_normaliser_equals_the_whole_sum(scale: float, has_blank: bool, count: int) -> None:
    """Also where nothing is left outside the candidates, and where one label has all the mass."""
    log_probs, best, delta = random_frames(scale, has_blank, count)
    at = best.unsqueeze(2).expand(-1, -1, delta.shape[2], -1)
    moved = torch.zeros_like(delta).scatter(-1, at, delta.gather(-1, at))
    blank_logp = blank_delta = None
    if has_blank:
        moved[..., -1] = delta[..., -1]
        blank_logp, blank_delta = log_probs[..., -1], delta[..., -1]
    expected = (log_probs.unsqueeze(2) + moved).logsumexp(-1)
    top_logp = log_probs.gather(-1, best).requires_grad_()
    found = normaliser(top_logp, delta.gather(-1, at), blank_logp, blank_delta)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    found.sum().backward()
    assert top_logp.grad is not None
    assert top_logp.grad.isfinite().all()


def test_normaliser_stays_finite_where_rounding_leaves_less_than_nothing() -> None:
    """All mass is the candidates', up to the last bit, and the transition takes nearly all of it away."""
    log_probs = torch.randn(64, FRAMES, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).log_softmax(
        -1
    )
    assert (log_probs.exp().sum(-1) > 1).any()
    found = normaliser(log_probs, torch.full((64, FRAMES, 1, VOCAB_SIZE), -30.0), None, None)
    assert found.isfinite().all()


@pytest.mark.parametrize(("kind", "alike"), [("markov", True), ("mlp", False)])
def test_only_an_mlp_depends_on_the_frame(kind: str, alike: bool) -> None:
    transition = make_transition(kind)
    hidden, previous = torch.randn(2, FRAMES, HIDDEN), torch.arange(8).view(2, 4)
    state = transition.state(hidden, previous, torch.randn(VOCAB_SIZE, HIDDEN))
    assert state.shape == (2, FRAMES, 4, SIZE)
    assert torch.equal(state[:, 0], state[:, 1]) == alike
    # On the label before, both do.
    assert (state[:, :, 0] - state[:, :, 1]).abs().min() > 1e-4


@pytest.mark.parametrize("kind", ["markov", "mlp"])
def test_tabulated_labels_are_the_same(kind: str) -> None:
    """What the exporter does; the table is no part of a checkpoint."""
    transition = make_transition(kind)
    embed_tokens, lm_head = torch.randn(2, VOCAB_SIZE, HIDDEN).unbind()
    labels, none = torch.arange(8).view(2, 4), torch.zeros_like(lm_head)
    names = set(transition.state_dict())
    previous = transition.of_previous(labels, embed_tokens)
    following = transition.of_following(labels, lm_head)
    transition.tabulate(embed_tokens, lm_head)
    torch.testing.assert_close(transition.of_previous(labels, none), previous, **TOLERANCE)
    torch.testing.assert_close(transition.of_following(labels, none), following, **TOLERANCE)
    assert set(transition.state_dict()) == names


@pytest.mark.parametrize("kind", ["markov", "mlp"])
def test_rows_are_what_the_state_and_the_labels_are_made_of(kind: str) -> None:
    transition = make_transition(kind)
    embed_tokens, lm_head = torch.randn(2, VOCAB_SIZE, HIDDEN).unbind()
    hidden, labels = torch.randn(2, FRAMES, HIDDEN), torch.arange(8).view(2, 4)
    frames, rows = transition.of_frames(hidden), transition.of_previous(labels, embed_tokens)
    assert (frames is None) == (kind == "markov")
    expected = rows if frames is None else torch.nn.functional.silu(frames[:, -1:] + rows)
    torch.testing.assert_close(transition.state(hidden, labels, embed_tokens)[:, -1], expected, **TOLERANCE)
    following, blank = transition.of_following(labels, lm_head), transition.blank_vector()
    assert blank is not None
    torch.testing.assert_close(following[:, :-1], transition.right(lm_head)[labels], **TOLERANCE)
    torch.testing.assert_close(following[:, -1], blank.expand(2, -1), **TOLERANCE)


def test_a_sum_that_rounds_to_zero_has_a_finite_logarithm() -> None:
    """D pushes every candidate below what float32 can hold, and nothing is outside them."""
    top = torch.tensor([[[0.5, 0.5]]]).log()
    delta = torch.full((1, 1, 1, 2), -200.0, requires_grad=True)
    total = normaliser(top, delta, None, None)
    (delta[..., 0] - total).sum().backward()
    assert total.isfinite().all()
    assert delta.grad is not None
    assert delta.grad.isfinite().all()
