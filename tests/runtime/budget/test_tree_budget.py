"""Choosing a tree's size: against trying every size, and its edges."""

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.budget.draft_worth import MOST_PATIENCE, PROBE_EVERY, TRIAL_STEPS
from runtime.budget.tree_budget import RunningBudget, TreeBudget

from runtime.budget.calibration import calibrate
from runtime.budget.step_costs import StepCosts
from runtime.decoding.sequence import Row
from runtime.trees.token_tree import TokenTree

STEP_MS = np.array([2.0, 2.1, 2.2, 2.6, 3.5, 5.0, 9.0])


def make_row() -> Row:
    return Row(np.array([1]), max_new_tokens=9, stops=frozenset(), detokenizer=None, acceptor=None)  # type: ignore[arg-type]


def chain(log_probs: NDArray[np.float64]) -> TokenTree:
    nodes = np.arange(log_probs.size + 1)
    return TokenTree(nodes, nodes - 1, nodes, np.append(0.0, log_probs))


class OneText:
    """The budget of a single row."""

    def __init__(self, step_ms: NDArray[np.float64], calibration: tuple[float, float] | None):
        self.budget = TreeBudget(step_ms[None], calibration).start()
        self.rows = [make_row()]

    def choose(self, log_probs: NDArray[np.float64]) -> int:
        (tree,) = self.budget.cut(self.rows, [chain(log_probs)])
        return len(tree) - 1

    def update(self, num_accepted: int) -> None:
        self.budget.update(self.rows, [num_accepted])


def test_the_size_is_the_best_of_all_sizes() -> None:
    """At the rate of plain decoding, with which a text begins."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        psi = np.sort(rng.random(6))[::-1]
        predicted = calibrate(psi, 0.7, -0.4)
        values = [1 + predicted[:n].sum() - STEP_MS[n] / STEP_MS[0] for n in range(1, 7)]
        assert OneText(STEP_MS, (0.7, -0.4)).choose(np.log(psi)) == 1 + int(np.argmax(values))


def test_the_rate_makes_drafts_dearer() -> None:
    budget = OneText(STEP_MS, None)
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
    budget = OneText(step_ms, None)
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
    budget = OneText(STEP_MS, None)
    assert budget.choose(np.log(np.array(psi))) == min(1, len(psi))
    budget.update(0)
    assert budget.choose(np.log(np.array([0.99]))) == 1


def test_a_head_thought_useless_is_found_out() -> None:
    budget = OneText(STEP_MS, (1.0, -9.0))
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


def step(
    budget: RunningBudget, rows: list[Row], psi: list[list[float]], searches: list[int] | None = None
) -> int:
    """Drafts a row in one step, all of which are accepted with their stated probability.

    searches: where to note for how many of them the head was asked
    """
    count, limit = budget.drafting(rows)
    if searches is not None:
        searches.append(count * limit)
    if not limit:
        budget.update(rows, [0] * len(rows))
        return 0
    drafted = [values[:limit] if index < count else [] for index, values in enumerate(psi)]
    trees = budget.cut(rows, [chain(np.log(values)) for values in drafted])
    budget.update(
        rows, [round(sum(values[: len(tree) - 1])) for values, tree in zip(psi, trees, strict=True)]
    )
    return max(len(tree) for tree in trees) - 1


def test_rows_share_a_width() -> None:
    """The width pays if it does for all rows together: one hopeful row does not widen a pass of eight."""
    step_ms = np.array([2.0, 2.4, 2.8, 3.2]) * np.linspace(1, 4, 8)[:, None]
    sure, doubtful = [0.95, 0.9, 0.85], [0.3, 0.05, 0.01]
    rows = [make_row() for _ in range(8)]
    assert step(TreeBudget(step_ms, None).start(), rows, [sure] * 8) == 3
    assert step(TreeBudget(step_ms, None).start(), rows, [doubtful] * 8) == 1
    assert step(TreeBudget(step_ms, None).start(), rows, [sure] + [doubtful] * 7) == 1
    assert step(TreeBudget(step_ms, None).start(), rows[:1], [sure]) == 3


def test_no_drafts_where_they_do_not_pay() -> None:
    """A machine whose pass costs as much as it is wide: there is nothing to win, and it is noticed."""
    step_ms = 3 * np.arange(1, 5)[None] + np.array([[0.0, 1.0, 1.0, 1.0]])
    budget, rows = TreeBudget(step_ms, None).start(), [make_row()]
    sizes = [step(budget, rows, [[0.9, 0.8, 0.7]]) for _ in range(300)]
    assert np.count_nonzero(sizes[100:]) <= 2 * TRIAL_STEPS
    # And noticed when it changes: other texts, nearly certain, on a machine where width costs little.
    budget = TreeBudget(np.array([[3.0, 3.5, 4.0, 4.5]]), (1.0, 0.0)).start()
    poor, rich = [[0.01, 0.001, 0.0001]], [[0.99, 0.98, 0.97]]
    assert {step(budget, rows, poor) for _ in range(100)} == {0, 1}
    sizes = [step(budget, [make_row()], rich) for _ in range(2 * PROBE_EVERY)]
    assert sizes[-1] == 3


def test_the_search_follows_what_pays() -> None:
    """Narrow while few drafts pay, so that none are looked for in vain; wide again when many do."""
    step_ms = (3 + 0.4 * np.arange(9.0))[None]
    budget, rows = TreeBudget(step_ms, None).start(), [make_row()]
    few, many = [[0.9, 0.8, *[0.01] * 6]], [[0.99] * 8]
    for _ in range(40):
        step(budget, rows, few)
    assert 3 <= budget.drafting(rows)[1] <= 4
    for _ in range(3 * PROBE_EVERY):
        step(budget, rows, many)
    assert budget.drafting(rows) == (1, 8)


def test_patience_grows_while_drafts_do_not_pay() -> None:
    """The tries of a long run without any use for drafts are few, and begin anew once there is one."""
    steep = np.array([[3.0, 12.0, 24.0, 36.0]])
    flat = np.array([[3.0, 3.1, 3.2, 3.3]] * 2)
    budget, rows, psi = TreeBudget(np.vstack((steep, flat)), None).start(), [make_row()], [0.7, 0.4, 0.2]
    searches: list[int] = []
    assert not any(step(budget, rows, [psi], searches) for _ in range(20_000))
    apart = np.diff(np.flatnonzero(searches))
    assert len(apart) >= 3
    assert np.all(np.diff(apart) >= 0)
    assert apart[-1] == MOST_PATIENCE
    # Two rows on the same machine: there they pay, from the first step on.
    assert step(budget, [*rows, make_row()], [psi, psi])
    searches.clear()
    assert not any(step(budget, rows, [psi], searches) for _ in range(2 * PROBE_EVERY))
    assert any(searches)


def test_a_try_is_as_wide_as_would_pay_best_for_good_drafts() -> None:
    """A fixed price for drafting, and nearly nothing for width: a single draft would never pay."""
    step_ms = np.array([[3.0, 8.0, *np.linspace(8.1, 9.0, 15)]])
    budget, rows = TreeBudget(step_ms, None).start(), [make_row()]
    poor, rich = [[0.01] * 16], [[0.9] * 16]
    sizes = [step(budget, rows, poor) for _ in range(PROBE_EVERY - 1)]
    assert sizes[-1] == 0
    sizes = [step(budget, rows, rich) for _ in range(20 * PROBE_EVERY)]
    assert sizes[-1] == 16


def test_where_drafts_can_never_pay_none_is_made_at_first() -> None:
    """What drafts are worth is not known before any has been seen; what is assumed is no wonder."""
    budget = TreeBudget(np.array([[3.0, 6.0, 9.0, 12.0]]), None).start()
    assert budget.drafting([make_row()]) == (1, 0)


def test_what_steps_take_corrects_what_they_were_measured_to_take() -> None:
    """Measured, drafts pay; under load they do not, and the other way round."""
    cheap, dear = np.array([[3.0, 3.5, 4.0, 4.5]]), np.array([[3.0, 6.0, 9.0, 12.0]])
    psi = [[0.6, 0.3, 0.1]]
    for measured, real, pays in ((cheap, dear, False), (dear, cheap, True)):
        budget, rows = TreeBudget(measured, None).start(), [make_row()]
        sizes = []
        for _ in range(20 * PROBE_EVERY):
            sizes.append(step(budget, rows, psi))
            budget.took(real[0, sizes[-1]])
        late = sizes[-4 * PROBE_EVERY :]
        assert (sizes[0] > 0) is not pays
        assert np.mean(np.array(late) > 0) == pytest.approx(float(pays), abs=0.05)


def test_costs_of_what_has_not_been_seen() -> None:
    step_ms = np.array([[2.0, 3.0, 4.0], [3.0, 5.0, 7.0], [4.0, 7.0, 9.0]])
    costs = StepCosts(step_ms)
    assert not costs.is_corrected
    assert costs.of(2).tolist() == [3.0, 5.0, 7.0]
    costs.add(2, 1, 10.0)
    assert costs.is_corrected
    assert costs.of(2).tolist() == [8.0, 10.0, 12.0]
    assert costs.of(1).tolist() == [2.0, 3.0, 4.0]
    for _ in range(200):
        costs.add(2, 0, 3.3)
    assert costs.of(2) == pytest.approx([3.3, 10.0, 12.0])
    # One step that the machine slept through does not count for what it took.
    costs.add(2, 0, 3e6)
    assert costs.of(2)[0] == pytest.approx(3.3 * 0.9 + 0.1 * 15.0)
    # However much less a step took, no other becomes free.
    for _ in range(200):
        costs.add(3, 2, 0.0)
    assert costs.of(3) == pytest.approx([0.8, 1.4, 1.8])


def test_what_the_head_reads_when_drafting_begins_is_no_step_s_cost() -> None:
    budget, rows = TreeBudget(np.array([[3.0, 3.5, 4.0]]), None).start(), [make_row()]
    assert step(budget, rows, [[0.9, 0.8]]) == 2
    budget.took(400.0)
    for _ in range(PROBE_EVERY // 2):
        assert step(budget, rows, [[0.9, 0.8]]) == 2
        budget.took(4.0)
