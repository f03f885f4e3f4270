"""Choosing how many nodes a step verifies: against trying every number, and its edges."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from runtime.core.calibration import calibrate
from runtime.decode.budget import AdaptiveBudget, PastTexts
from runtime.decode.budget_rules import DEFAULT_CONSTANTS, BudgetConstants
from runtime.decode.step import FirstDrafts, StepResult
from runtime.decode.step_costs import StepCosts
from tests.step_costs import RecordedCosts

# The last step's probabilities alone count, and the head is trusted whatever happens.
FORGETFUL: dict[str, Any] = {
    "gain_memory": 0.0,
    "worth_memory": 0.0,
    "accepted_share": 0.0,
    "usual_doubt": 0.0,
}


def result_of(psi: Sequence[Sequence[float]], num_accepted: Sequence[int]) -> StepResult:
    """psi: the prefix probabilities of every sequence's nodes; of how many of them were accepted"""
    counts = 1 + np.array(num_accepted, np.int64)
    with np.errstate(divide="ignore"):
        node_log_probs = np.log(np.array(psi, np.float64).reshape(counts.size, -1))
    tokens = np.zeros((counts.size, counts.max()), np.int64)
    return StepResult(tokens, counts, ((),) * counts.size, node_log_probs)


def adaptive(
    step_ms: NDArray[np.float64],
    calibration: tuple[float, float] | None,
    constants: BudgetConstants = DEFAULT_CONSTANTS,
    **options: Any,
) -> AdaptiveBudget:
    return AdaptiveBudget(StepCosts(step_ms), calibration, constants, **options)


class Run:
    """A run in which as many nodes are accepted as their probabilities say: what is left over waits."""

    def __init__(
        self, step_ms: ArrayLike, calibration: tuple[float, float] | None = None, **constants: Any
    ) -> None:
        self.budget = adaptive(
            np.asarray(step_ms, np.float64), calibration, replace(DEFAULT_CONSTANTS, **constants)
        )
        self._left_over = 0.0

    def step(self, psi: Sequence[Sequence[float]], ms: Sequence[float] | None = None) -> int:
        """How many nodes a step drafts. ms: what it takes with 0, 1, ... nodes; else no time is recorded."""
        num_nodes = self.budget.num_nodes(len(psi))
        drafted = [list(values[:num_nodes]) for values in psi]
        accepted = []
        for values in drafted:
            self._left_over += sum(values)
            accepted.append(min(round(self._left_over), len(values)))
            self._left_over -= accepted[-1]
        self.budget.learn(result_of(drafted, accepted), None if ms is None else ms[num_nodes])
        return num_nodes

    def steps(self, psi: Sequence[float], count: int, ms: Sequence[float] | None = None) -> list[int]:
        """Steps of a single sequence."""
        return [self.step([psi], ms) for _ in range(count)]


def best_of(gains: Sequence[float], step_ms: Sequence[float]) -> int:
    """The number of nodes with the most tokens for each millisecond, by trying every one."""
    rates = [(1 + sum(gains[:count])) / ms for count, ms in enumerate(step_ms)]
    return rates.index(max(rates))


def assumed(count: int) -> list[float]:
    """What nodes are taken to give before any has been seen."""
    constants = DEFAULT_CONSTANTS
    first_gain = constants.first_gain * (1 - constants.usual_doubt)
    return [first_gain * constants.next_gain**node for node in range(count)]


@st.composite
def tables(draw: st.DrawFn) -> NDArray[np.float64]:
    """Times of steps of 1 to 3 sequences with 0 to 6 nodes: more of either never takes less."""
    increments = draw(st.lists(st.floats(0.0, 1.0), min_size=21, max_size=21))
    return np.array(1 + np.reshape(increments, (3, 7)).cumsum(0).cumsum(1), np.float64)


@settings(max_examples=100)
@given(step_ms=tables(), num_seqs=st.integers(1, 3))
def test_the_first_choice_is_the_best_of_all_for_what_is_assumed(
    step_ms: NDArray[np.float64], num_seqs: int
) -> None:
    times = step_ms[num_seqs - 1].tolist()
    assert adaptive(step_ms, None).num_nodes(num_seqs) == best_of(assumed(6), times)


@settings(max_examples=200)
@given(
    step_ms=tables(),
    psi=st.lists(st.lists(st.floats(0.01, 0.99), min_size=6, max_size=6), min_size=1, max_size=3),
    num_found=st.integers(0, 6),
    calibration=st.sampled_from([None, (0.7, -0.4), (1.5, 1.0)]),
)
def test_the_next_choice_is_the_best_of_all_for_what_was_seen(
    step_ms: NDArray[np.float64],
    psi: list[list[float]],
    num_found: int,
    calibration: tuple[float, float] | None,
) -> None:
    """The gains are the sequences' mean acceptance probabilities: none of a node that the head did not find,
    and beyond what was asked for falling as before. Here they follow the last step alone.
    """
    constants = replace(DEFAULT_CONSTANTS, first_steps=1e9, **FORGETFUL)
    budget = adaptive(step_ms, calibration, constants)
    num_nodes = budget.num_nodes(len(psi))
    if not num_nodes:
        return
    found = [sorted(values, reverse=True)[: min(num_nodes, num_found)] for values in psi]
    budget.learn(result_of(found, [0] * len(psi)))
    gains = calibrate(found, *(calibration or (1.0, 0.0))).mean(0).tolist()
    gains += [0.0] * (num_nodes - len(gains))
    before = gains[-2] if num_nodes > 1 else 1.0
    share = gains[-1] / before if before else 0.0
    share = max(constants.next_gain, min(constants.most_next_gain, share))
    gains += [gains[-1] * share**further for further in range(1, 7 - num_nodes)]
    assert budget.num_nodes(len(psi)) == best_of(gains, step_ms[len(psi) - 1].tolist())


def test_gains_are_a_moving_average() -> None:
    """Two poor steps change little, forty of them much."""
    run = Run([[3.0, 3.6, 4.4, 5.4, 6.6]])
    good, poor = [0.95, 0.9, 0.85, 0.8], [0.3, 0.05, 0.01, 0.01]
    assert run.steps(good, 40)[-1] == 3
    assert run.steps(poor, 2)[-1] == 3
    assert run.steps(poor, 40)[-1] == 1


@pytest.mark.parametrize("falling", [0.5, 0.6, 0.7])
def test_the_number_follows_what_pays(falling: float) -> None:
    """Few while few nodes pay, with at most two more that are looked at in vain; many again when many do."""
    times = [3 + 0.4 * node for node in range(9)]
    poor = [falling**node for node in range(1, 9)]
    best = best_of(poor, times)
    assert best <= 4
    run = Run([times])
    for _ in range(3):
        sizes = run.steps(poor, 80)[-20:]
        assert best - 1 <= min(sizes)
        assert max(sizes) <= best + 2
        assert run.steps([0.99] * 8, 80)[-1] == 8


def test_a_better_rate_makes_nodes_dearer() -> None:
    """The same doubtful nodes pay where they are the first, and not behind nodes that give more."""
    times = [2.0, 2.3, 2.6, 2.9, 3.2]
    doubtful = [0.3, 0.25]
    assert Run([times[:3]], **FORGETFUL).steps(doubtful, 2) == [2, 2]
    assert Run([times], **FORGETFUL).steps([0.99, 0.98, *doubtful], 2) == [3, 2]


def test_a_text_begins_with_as_many_nodes_as_paid_before() -> None:
    """And with no fewer than the first text, after one that the head knew little of."""
    times = np.array([[3 + 0.4 * node for node in range(9)]])

    def first_after(psi: Sequence[float]) -> int:
        run = Run(times)
        run.steps(psi, 200)
        return adaptive(times, None, past=run.budget._past).num_nodes(1)

    fresh = adaptive(times, None).num_nodes(1)
    assert 0 < fresh < 8
    assert first_after([0.99] * 8) == 8
    assert first_after([0.5**node for node in range(1, 9)]) == fresh


def test_sequences_share_a_number() -> None:
    """It pays if it does for all sequences together: one hopeful one does not widen a pass of eight."""
    step_ms = np.array([2.0, 2.4, 3.1, 3.9]) * np.linspace(1, 4, 8)[:, None]
    sure, doubtful = [0.95, 0.9, 0.85], [0.3, 0.05, 0.01]

    def last(psi: list[list[float]]) -> int:
        run = Run(step_ms)
        return [run.step(psi) for _ in range(60)][-1]

    assert last([sure] * 8) == 3
    assert last([doubtful] * 8) == 1
    assert last([sure] + [doubtful] * 7) == 1
    assert last([sure]) == 3


def test_more_tokens_over_time_than_any_fixed_number() -> None:
    """Over a run whose texts differ."""
    random = np.random.default_rng(1)
    step_ms = np.array([4.0, 4.3, 4.6, 5.0, 5.5, 6.1, 6.8, 7.6, 8.5])
    budget = adaptive(step_ms[None], None)
    fixed_tokens, tokens, ms, count = np.zeros(9), 0, 0.0, 0
    for _ in range(60):
        psi = np.cumprod(np.full(8, random.choice([0.2, 0.6, 0.95])))
        for _ in range(100):
            depth = int(np.argmin([*(random.random(8) < psi / np.array([1.0, *psi[:-1]])), False]))
            size = budget.num_nodes(1)
            budget.learn(result_of([psi[:size].tolist()], [min(depth, size)]))
            tokens, ms, count = tokens + 1 + min(depth, size), ms + step_ms[size], count + 1
            fixed_tokens += 1 + np.minimum(depth, np.arange(9))
    assert tokens / ms > 1.01 * (fixed_tokens / (count * step_ms)).max()


# After the draft: by the probabilities of a step's own nodes.


@settings(max_examples=200)
@given(
    step_ms=tables(),
    psi=st.lists(st.lists(st.floats(0.01, 0.99), min_size=6, max_size=6), min_size=1, max_size=3),
    calibration=st.sampled_from([None, (0.7, -0.4), (1.5, 1.0)]),
)
def test_a_node_is_verified_if_it_gives_more_than_its_time_gives_elsewhere(
    step_ms: NDArray[np.float64], psi: list[list[float]], calibration: tuple[float, float] | None
) -> None:
    """Against trying every size. Here the rate is that of plain decoding, which never fades."""
    constants = replace(DEFAULT_CONSTANTS, first_steps=1e9, usual_doubt=0.0)
    costs = RecordedCosts(step_ms)
    budget = AdaptiveBudget(costs, calibration, constants)
    if not budget.num_nodes(len(psi)):
        return
    # A draft takes a tenth of a plain step.
    plain_ms = float(costs.of(len(psi))[0])
    costs.record(len(psi), 0, 1.1 * plain_ms, draft_ms=0.1 * plain_ms)
    found = np.array([sorted(values, reverse=True) for values in psi])
    gains = calibrate(found, *(calibration or (1.0, 0.0))).mean(0)
    times = step_ms[len(psi) - 1]
    worth = {
        count: gains[:count].sum() - times[count] / times[0] - (0.1 if not count else 0.0)
        for count in constants.verified_nodes
        if count <= 6
    }
    assert worth[budget.num_verified(np.log(found))] == pytest.approx(max(worth.values()))


def test_the_rate_is_that_of_the_last_steps() -> None:
    """Where steps give much, a doubtful node is left out that is verified where they give little."""
    doubtful = np.log([[0.9, 0.5]])

    def after(psi: Sequence[float]) -> int:
        budget, left_over = adaptive(np.array([[3.0, 3.5, 4.5]]), None), 0.0
        for _ in range(500):
            count = budget.num_verified(np.log([psi])) if budget.num_nodes(1) else 0
            left_over += sum(psi[:count])
            budget.learn(result_of([psi[:count]], [int(left_over)]))
            left_over %= 1
        budget.num_nodes(1)
        return budget.num_verified(doubtful)

    assert after([0.99, 0.99]) == 1
    assert after([0.5, 0.01]) == 2


def test_more_tokens_over_time_than_any_choice_before_the_draft() -> None:
    """Texts whose steps differ from each other: the head is sure of some and not of others."""
    random = np.random.default_rng(1)
    step_ms = np.array([4.0, 4.5, 4.8, 5.2, 5.7, 6.3, 7.0, 7.8, 8.7])
    budget = adaptive(step_ms[None], None)
    fixed_tokens, tokens, ms, count = np.zeros(9), 0, 0.0, 6000
    for _ in range(count):
        psi = np.cumprod(np.full(8, random.choice([0.1, 0.6, 0.95])))
        depth = int(np.argmin([*(random.random(8) < psi / np.array([1.0, *psi[:-1]])), False]))
        drafted = psi[: budget.num_nodes(1)]
        size = budget.num_verified(np.log([drafted])) if drafted.size else 0
        budget.learn(result_of([drafted[:size].tolist()], [min(depth, size)]))
        tokens, ms = tokens + 1 + min(depth, size), ms + step_ms[size]
        fixed_tokens += 1 + np.minimum(depth, np.arange(9))
    assert tokens / ms > 1.05 * (fixed_tokens / (count * step_ms)).max()


def test_a_head_that_found_nothing_has_nothing_verified() -> None:
    """What the step takes beside its draft corrects the time of plain steps."""
    costs = RecordedCosts(np.array([[2.0, 2.1, 2.2]]))
    budget = AdaptiveBudget(costs, None)
    assert budget.num_nodes(1) > 0
    assert budget.num_verified(np.zeros((1, 0))) == 0
    budget.learn(replace(result_of([[]], [0]), draft_ms=0.25), 1.75)
    assert costs.of(1) == pytest.approx([1.5, 1.6, 1.7])


def test_a_first_draft_that_is_not_verified_and_right_makes_the_next_ones_worth_it() -> None:
    """The draft has been made, so a node has to give only what its pass takes: 0.4 of a plain step."""
    log_probs = np.log([[0.3]])

    def verified_after(is_right: bool) -> list[int]:
        costs = RecordedCosts(np.array([[2.0, 3.0]]))
        costs.record(1, 0, 2.2, draft_ms=0.2)
        budget = AdaptiveBudget(
            costs, None, replace(DEFAULT_CONSTANTS, first_gain=0.9, first_weight=1e9, usual_doubt=0.0)
        )
        found = []
        for _ in range(40):
            if not budget.num_nodes(1):
                break
            found.append(budget.num_verified(log_probs))
            if found[-1]:
                break
            right = np.array([is_right])
            budget.learn(replace(result_of([[]], [0]), unverified=FirstDrafts(log_probs, right)))
        return found

    *before, last = verified_after(is_right=True)
    assert set(before) == {0}
    assert last == 1
    assert set(verified_after(is_right=False)) == {0}


# States: drafting and plain.


def test_where_drafts_can_never_pay_none_is_made_at_first() -> None:
    """What drafts give is not known before any has been seen, but what is assumed is no wonder."""
    assert adaptive(np.array([[3.0, 6.0, 9.0, 12.0]]), None).num_nodes(1) == 0


def test_no_drafts_where_they_can_never_pay() -> None:
    """A machine whose step costs as much as it is wide: nothing can be won."""
    assert not any(Run([[3.0, 7.0, 10.0, 13.0]]).steps([0.9, 0.8, 0.7], 5000))


def test_drafts_that_pay_again_are_noticed() -> None:
    """Poor texts first, then nearly certain ones, on a machine where width costs little."""
    run = Run([[3.0, 3.5, 4.0, 4.5]], (1.0, 0.0))
    sizes = run.steps([0.01, 0.001, 0.0001], 100)
    assert sizes[0] > 0
    assert 0 in sizes
    sizes = run.steps([0.99, 0.98, 0.97], 1000)
    assert sizes[0] == 0
    assert sizes[-1] == 3


def test_the_less_drafts_give_the_more_rarely_they_are_tried() -> None:
    """A node has to be accepted in two of three steps to pay."""
    shares = []
    for psi in ([0.0], [0.3], [0.6]):
        sizes = np.array(Run([[3.0, 5.0]]).steps(psi, 8_000))
        assert sizes[:-1][np.diff(sizes) > 0].max() == 0
        shares.append(np.count_nonzero(sizes[4_000:]) / 4_000)
    assert 0 < shares[0] < shares[1] < shares[2] < 0.15
    assert shares[0] < 0.015


def test_a_useless_head_is_found_out_soon() -> None:
    """A node has to be accepted in one of four steps to pay."""
    sizes = Run([[4.0, 5.0]]).steps([0.0], 20)
    assert 2 <= sum(sizes[:8]) <= 6
    assert sum(sizes) <= 8


def test_the_worth_follows_what_is_accepted_by_a_share() -> None:
    worth = []
    for num_accepted in (0, 1):
        budget = adaptive(np.array([[2.0, 2.1]]), None)
        budget.num_nodes(1)
        assert budget.num_verified(np.log([[0.9]])) == 1
        budget.learn(result_of([[0.9]], [num_accepted]))
        worth.append(float(budget._rates[1]["worth"][0]))
    # The first step counts for a third: the assumed worth counts for two.
    assert worth[1] - worth[0] == pytest.approx(DEFAULT_CONSTANTS.accepted_share / 3)


def steps_of_a_head_that_finds_nothing(num_seqs: int) -> NDArray[np.int64]:
    """The steps of 1,000 in which it was tried."""
    costs = RecordedCosts(np.tile([2.0, 3.8], (num_seqs, 1)))
    costs.record(num_seqs, 0, 3.5, draft_ms=1.5)
    budget = AdaptiveBudget(costs, (1.0, 0.0), replace(DEFAULT_CONSTANTS, usual_doubt=0.0, first_gain=0.99))
    log_probs, drafted = np.full((num_seqs, 1), np.log(0.0001)), []
    for _ in range(1000):
        drafted.append(budget.num_nodes(num_seqs) > 0)
        result = result_of([[]] * num_seqs, [0] * num_seqs)
        if drafted[-1]:
            assert budget.num_verified(log_probs) == 0
            result = replace(result, unverified=FirstDrafts(log_probs, np.zeros(num_seqs, bool)))
        budget.learn(result)
    return np.flatnonzero(drafted)


def test_after_one_bad_step_the_head_is_soon_tried_again() -> None:
    """And later after many: how long it waits grows with what is known."""
    waits = np.diff(steps_of_a_head_that_finds_nothing(1))
    assert waits[waits > 1][0] <= 20
    assert waits[-1] >= 40


def test_a_step_of_many_sequences_says_as_much_as_many_steps() -> None:
    alone, together = (steps_of_a_head_that_finds_nothing(num_seqs) for num_seqs in (1, 8))
    assert len(alone) >= 20
    assert 2 <= len(together) <= len(alone) / 4
    assert np.diff(together)[0] > 5 * np.diff(alone)[0]


def test_whether_a_step_drafts_follows_what_was_accepted() -> None:
    """Probabilities that promise too little or too much are put right by what comes, in both directions."""

    def last_sizes(psi: float, period: int) -> list[int]:
        """Every ``period``-th step has its draft accepted."""
        costs = RecordedCosts(np.array([[2.0, 3.0]]))
        costs.record(1, 0, 2.2, draft_ms=0.2)
        budget = AdaptiveBudget(costs, None)
        sizes = []
        for step in range(400):
            sizes.append(budget.num_nodes(1))
            is_right = step % period == 0
            if not sizes[-1]:
                budget.learn(result_of([[]], [0]))
            elif budget.num_verified(np.log([[psi]])):
                budget.learn(result_of([[psi]], [int(is_right)]))
            else:
                first = FirstDrafts(np.log([[psi]]), np.array([is_right]))
                budget.learn(replace(result_of([[]], [0]), unverified=first))
        return sizes[-100:]

    assert np.mean(last_sizes(0.9, 8)) < 0.2
    assert np.mean(last_sizes(0.6, 1)) == 1


def test_trials_are_rare_where_a_sure_head_is_wrong_and_frequent_where_an_unsure_one_is_right() -> None:
    """Neither pays. What a sure head says is no longer believed; then drafts that are accepted convince."""
    run = Run([[4.0, 5.0]])
    for _ in range(30):
        run.budget.num_nodes(1)
        run.budget.learn(result_of([[0.9]], [0]))
    waits = {psi: np.diff(np.flatnonzero(Run([[4.0, 5.0]]).steps([psi], 2000))).max() for psi in (0.1, 0.2)}
    steps = 0
    while steps < 3000 and not run.budget.num_nodes(1):
        run.budget.learn(result_of([[]], [0]))
        steps += 1
    assert steps < 3000
    assert steps > 1.25 * waits[0.1] > 1.25 * waits[0.2]
    assert run.steps([0.9], 200)[-50:] == 50 * [1]


def test_a_head_is_tried_with_as_many_nodes_as_could_pay() -> None:
    """A fixed price for drafting, and nearly nothing for width: a single node would never pay."""
    run = Run([[3.0, 8.0, *np.linspace(8.1, 9.0, 15)]])
    assert run.steps([0.01] * 16, 60)[-1] == 0
    assert run.steps([0.9] * 16, 1500)[-1] == 16


# What is learned.


@pytest.mark.parametrize("psi", [[], [1e-30], [1e-12, 0.0]])
def test_nothing_worth_verifying(psi: list[float]) -> None:
    """Trees without nodes, or with none that could be accepted: drafting stops, and nothing breaks."""
    budget = adaptive(np.array([[2.0, 2.1, 2.2, 2.6]]), None)
    sizes = []
    with np.errstate(divide="raise", invalid="raise"):
        for _ in range(100):
            sizes.append(budget.num_nodes(1))
            budget.learn(result_of([psi[: sizes[-1]]], [0]))
    assert sizes[0] > 0
    assert sizes[-20:].count(0) >= 14


def test_a_head_thought_useless_is_found_out() -> None:
    """The running calibration follows what is accepted."""
    run = Run([[2.0, 2.4, 2.8, 3.2]], (1.0, -6.0))
    assert run.steps([0.9, 0.8, 0.7], 1000)[-1] == 3


def test_a_head_thought_perfect_is_found_out() -> None:
    budget = adaptive(np.array([[2.0, 2.4, 2.8, 3.2]]), (1.0, 5.0))
    sizes = []
    for _ in range(30):
        sizes.append(budget.num_nodes(1))
        budget.learn(result_of([[0.9, 0.8, 0.7][: sizes[-1]]], [0]))
    assert sizes[0] == 3
    assert sizes[-1] == 0


@pytest.mark.parametrize(
    ("measured", "real", "pays"),
    [
        ([3.0, 5.5, 8.0, 10.5], [3.0, 3.5, 4.0, 4.5], True),
        ([3.0, 3.5, 4.0, 4.5], [3.0, 6.0, 9.0, 12.0], False),
        ([3.0, 3.5, 4.0, 4.5], [9.0, 9.5, 10.0, 10.5], True),
        ([3.0, 6.0, 9.0, 12.0], [9.0, 12.0, 15.0, 18.0], True),
    ],
    ids=["drafts are cheap", "drafts are dear", "all steps are slow", "width is cheap beside slow steps"],
)
def test_recorded_times_correct_those_measured(measured: list[float], real: list[float], pays: bool) -> None:
    """Once steps of both kinds were recorded, the choice is that of the real times."""
    psi = [0.6, 0.4, 0.2]
    assert (best_of(psi, real) > 0) is pays
    run = Run([measured])
    # A text of which nothing is accepted: plain steps are recorded.
    run.steps([0.001] * 3, 100, real)
    sizes = run.steps(psi, 3000, real)
    assert np.mean(np.array(sizes[-500:]) > 0) == pytest.approx(float(pays), abs=0.05)


@pytest.mark.parametrize("slope", [0.2, 3.0])
def test_recorded_times_correct_the_slope(slope: float) -> None:
    """Times measured with another slope and level become those of the steps, also of sizes that none had."""
    nodes = np.arange(17)
    real = np.where(nodes > 0, 12.0 + 1.2 * nodes, 10.0)
    costs = RecordedCosts(np.where(nodes > 0, 15.0 + slope * nodes, 10.0)[None])
    for size in [1, 3, 8, 2, 4, 6] * 20:
        costs.record(1, size, real[size])
    found = costs.of(1)
    assert np.abs(found[1:9] / real[1:9] - 1).max() < 0.12
    assert (np.diff(found[1:]) >= 0).all()


def test_steps_of_one_size_say_nothing_of_the_slope() -> None:
    measured = np.array([10.0, 12.0, 13.0, 14.0, 15.0])
    costs = RecordedCosts(measured[None])
    for _ in range(50):
        costs.record(1, 3, 16.0)
    np.testing.assert_allclose(costs.of(1), measured + 2)


def test_the_first_drafting_step_is_not_recorded() -> None:
    """The head also reads the prompt in it: its time says nothing of the next ones."""

    def after_drafted_steps(ms: Sequence[float]) -> int:
        """What is drafted after plain steps and three drafted ones; as measured, drafts pay."""
        run = Run([[3.0, 5.0]], first_gain=0.6)
        while not run.step([[1.0]], [3.0, ms[0]]):
            pass
        assert run.steps([1.0], 2, [np.nan, ms[1]]) == [1, 1]
        return run.budget.num_nodes(1)

    assert after_drafted_steps([400.0, 5.0]) == 1
    assert after_drafted_steps([5.0, 400.0]) == 0


def test_drafts_that_seemed_free_are_found_out_by_their_own_time() -> None:
    """The machine was slow while plain steps were measured. As every step drafts, no plain one is seen."""

    def drafted_share(draft_ms: float) -> float:
        budget = adaptive(np.array([[13.0, 13.0]]), None)
        sizes = []
        for _ in range(300):
            sizes.append(budget.num_nodes(1))
            result = result_of([[0.05][: sizes[-1]]], [0])
            budget.learn(replace(result, draft_ms=draft_ms * sizes[-1]), 13.0 if sizes[-1] else 10.0)
        return float(np.mean(sizes[-100:]))

    assert drafted_share(0.0) == 1
    assert drafted_share(2.5) < 0.1


def test_a_head_sure_of_what_is_wrong_is_known_after_a_text() -> None:
    """The first text needs more drafts to find it out than the next ones, and no text needs many."""
    past, counts = PastTexts(), []
    for _ in range(3):
        budget = adaptive(np.array([[4.0, 4.6, 5.2, 5.8]]), (1.0, 0.0), past=past)
        sizes = []
        for step in range(200):
            sizes.append(budget.num_nodes(1))
            psi = [0.999, 0.99, 0.98] if step % 3 else [0.6, 0.5, 0.4]
            budget.learn(result_of([psi[: sizes[-1]]], [0]))
        counts.append(np.count_nonzero(sizes))
    assert max(counts[1:]) < counts[0] < 25


def test_runs_do_not_share_what_they_learn() -> None:
    step_ms = np.array([[3.0, 3.5, 4.0, 4.5]])
    before = step_ms.copy()
    Run(step_ms).steps([0.01, 0.001, 0.0001], 100)
    assert np.array_equal(step_ms, before)
    assert adaptive(step_ms, None).num_nodes(1) == 3


def test_only_sizes_that_a_step_can_have_are_asked_for() -> None:
    step_ms = np.array([[2.0, 2.1, 2.2, 2.3, 2.4, 9.0]])
    assert adaptive(step_ms, None).num_nodes(1) == 4
    assert adaptive(step_ms, None, tree_sizes=(0, 2, 5, 64)).num_nodes(1) == 2
    assert adaptive(step_ms, None, tree_sizes=(0, 64)).num_nodes(1) == 0
