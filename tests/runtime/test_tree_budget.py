"""Choosing a tree's size: against trying every size, and its edges."""

import numpy as np
import pytest

from runtime.calibration import calibrate
from runtime.tree import TokenTree
from runtime.tree_budget import TreeBudget

STEP_MS = np.array([2.0, 2.1, 2.2, 2.6, 3.5, 5.0, 9.0])


def test_the_size_is_the_best_of_all_sizes() -> None:
    """At the rate of plain decoding, with which a text begins."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        psi = np.sort(rng.random(6))[::-1]
        predicted = calibrate(psi, 0.7, -0.4)
        values = [1 + predicted[:n].sum() - STEP_MS[n] / STEP_MS[0] for n in range(1, 7)]
        assert TreeBudget(STEP_MS, (0.7, -0.4)).start().choose(np.log(psi)) == 1 + int(np.argmax(values))


def test_the_rate_makes_drafts_dearer() -> None:
    budget = TreeBudget(STEP_MS, None).start()
    likely, doubtful = np.log([0.99, 0.98, 0.97]), np.log([0.9, 0.3, 0.25])
    assert budget.choose(doubtful) == 3
    for _ in range(20):
        assert budget.choose(likely) == 3
        budget.update(3)
    # Steps now give nearly four tokens: a draft has to bring that many for its time.
    assert budget.choose(doubtful) < 3


def test_choosing_maximises_tokens_over_time() -> None:
    """Better over a whole text than the best fixed size."""
    rng = np.random.default_rng(1)
    step_ms = 4 + np.array([0.0, 0.1, 0.3, 0.6, 1.0, 1.5, 2.1, 2.8, 3.6])
    budget = TreeBudget(step_ms, None).start()
    fixed_tokens, tokens, ms = np.zeros(9), 0, 0.0
    count = 3000
    for _ in range(count):
        psi = np.cumprod(np.full(8, rng.choice([0.3, 0.6, 0.95])))
        depth = int(np.argmin([*(rng.random() < psi / np.array([1.0, *psi[:-1]])), False]))
        size = budget.choose(np.log(psi))
        budget.update(min(depth, size))
        tokens, ms = tokens + 1 + min(depth, size), ms + step_ms[size]
        fixed_tokens += 1 + np.minimum(depth, np.arange(9))
    assert tokens / ms > 1.01 * (fixed_tokens / (count * step_ms)).max()


@pytest.mark.parametrize("psi", [[], [1e-30], [1e-12, 1e-13]])
def test_nothing_worth_verifying(psi: list[float]) -> None:
    budget = TreeBudget(STEP_MS, None).start()
    assert budget.choose(np.log(np.array(psi))) == min(1, len(psi))
    budget.update(0)
    assert budget.choose(np.log(np.array([0.99]))) == 1


def test_a_head_thought_useless_is_found_out() -> None:
    budget = TreeBudget(STEP_MS, (1.0, -9.0)).start()
    psi = np.log([0.9, 0.8, 0.7])
    sizes = []
    for _ in range(20):
        sizes.append(budget.choose(psi))
        budget.update(sizes[-1])
    assert sizes[0] == 1
    assert sizes[-1] == 3


def test_the_first_drafts_of_a_tree() -> None:
    tree = TokenTree(
        np.array([7, 1, 2, 3]), np.array([-1, 0, 0, 1]), np.array([0, 1, 1, 2]), np.log([1, 0.5, 0.4, 0.3])
    )
    short = tree.first(2)
    assert len(short) == 3
    assert short.tokens.tolist() == [7, 1, 2]
    assert short.log_probs.tolist() == tree.log_probs[:3].tolist()
    assert len(tree.first(0)) == 1
