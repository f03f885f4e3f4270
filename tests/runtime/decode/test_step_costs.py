"""What steps are taken to cost: as measured beforehand, corrected by what was recorded."""

from dataclasses import replace

import numpy as np
import pytest

from runtime.decode.step_costs import DEFAULT_CONSTANTS
from tests.step_costs import RecordedCosts

STEP_MS = np.array([[2.0, 3.0, 4.0], [3.0, 5.0, 7.0], [4.0, 7.0, 9.0], [5.0, 9.0, 11.0], [6.0, 11.0, 13.0]])


def make() -> RecordedCosts:
    return RecordedCosts(STEP_MS, DEFAULT_CONSTANTS)


def test_as_measured_until_something_is_recorded() -> None:
    for num_seqs, expected in enumerate(STEP_MS, start=1):
        assert make().of(num_seqs).tolist() == expected.tolist()


def test_a_kind_of_step_not_recorded_takes_as_much_more_as_the_other() -> None:
    for num_nodes in (0, 2):
        costs = make()
        costs.record(2, num_nodes, STEP_MS[1, num_nodes] + 1.0)
        assert costs.of(2).tolist() == [4.0, 6.0, 8.0]


def test_a_step_that_verifies_none_of_its_drafts_is_a_plain_one_and_a_draft() -> None:
    costs = make()
    _, shown = costs.records(1)
    costs.record(1, 0, 2.0)
    assert shown["draft_ms"] == np.inf
    costs.record(1, 1, 3.0, draft_ms=0.5)
    assert shown["draft_ms"] == 0.5
    costs.record(1, 0, 2.5, draft_ms=0.5)
    assert costs.of(1).tolist() == [2.0, 3.0, 4.0]
    # One slow draft moves the mean a little.
    costs.record(1, 0, 102.0, draft_ms=100.0)
    assert costs.of(1)[0] == pytest.approx(2.0)
    assert 0.5 < shown["draft_ms"] < 0.51


def test_plain_steps_and_drafting_steps_are_corrected_apart() -> None:
    costs = make()
    costs.record(2, 1, 7.0)
    for _ in range(200):
        costs.record(2, 0, 3.3)
    assert costs.of(2) == pytest.approx([3.3, 7.0, 9.0])


def test_numbers_of_sequences_up_to_a_power_of_two_share_a_correction() -> None:
    costs = make()
    costs.record(3, 1, 8.0)
    assert costs.of(3).tolist() == [5.0, 8.0, 10.0]
    assert costs.of(4).tolist() == [6.0, 10.0, 12.0]
    for num_seqs in (1, 2, 5):
        assert costs.of(num_seqs).tolist() == STEP_MS[num_seqs - 1].tolist()


def test_a_correction_of_plain_steps_is_a_moving_average() -> None:
    costs = make()
    costs.record(1, 0, 3.0)
    costs.record(1, 0, 4.0)
    memory = DEFAULT_CONSTANTS.time_memory
    assert costs.of(1)[0] == pytest.approx(2.0 + memory * 1.0 + (1 - memory) * 2.0)


def test_a_correction_of_drafting_steps_is_a_line_over_the_nodes() -> None:
    """Steps that take 1 ms more and 0.5 ms more a node, in turns of 1, 4 and 8 nodes."""
    step_ms = np.arange(2.0, 12.0)[None, :]
    costs = RecordedCosts(step_ms, replace(DEFAULT_CONSTANTS, slope_prior=1e-9))
    for num_nodes in [1, 4, 8] * 20:
        costs.record(1, num_nodes, step_ms[0, num_nodes] + 1.0 + 0.5 * num_nodes)
    drafted = np.arange(1, 10)
    assert costs.of(1)[1:] == pytest.approx(step_ms[0, 1:] + 1.0 + 0.5 * drafted)


def test_a_line_over_few_numbers_of_nodes_is_flattened() -> None:
    """Noise of two neighbouring numbers of nodes must not decide about far ones."""
    step_ms = np.arange(2.0, 12.0)[None, :]
    costs = RecordedCosts(step_ms, replace(DEFAULT_CONSTANTS, beside_prior=np.inf))
    for num_nodes in [1, 2] * 20:
        costs.record(1, num_nodes, step_ms[0, num_nodes] + 0.9 * num_nodes)
    assert costs.of(1)[9] == pytest.approx(step_ms[0, 9] + 0.9 * 1.5 + 0.1 * 7.5, abs=0.1)


def test_recorded_times_show_stairs() -> None:
    """Rows are computed in groups of 6, so a 6th node (the 7th row) costs much and a 5th little."""
    nodes = np.arange(17)
    real = np.where(nodes > 0, 30.0 + 0.8 * nodes + 4.0 * ((nodes + 1) // 7), 28.0)
    measured = np.where(nodes > 0, 31.0 + 1.4 * nodes, 28.0)
    costs = RecordedCosts(measured[None])
    random = np.random.default_rng(0)
    for size in random.permutation([1, 2, 3, 4, 5, 6, 8] * 40):
        costs.record(1, size, real[size] * random.uniform(0.95, 1.05))
    found = costs.of(1)
    assert found[6] - found[5] > 2.0
    assert np.diff(found[1:6]).max() < 1.5


def test_a_step_that_the_machine_slept_through_does_not_count_for_what_it_took() -> None:
    costs = make()
    for _ in range(200):
        costs.record(2, 0, 3.3)
    costs.record(2, 0, 3e6)
    assert costs.of(2)[0] == pytest.approx(3.3 * 0.9 + 0.1 * 3.3 * 1.5)


def test_slow_plain_steps_of_before_are_not_believed_for_ever() -> None:
    """While steps draft, no plain step is seen that would correct it, and drafts would always seem to pay."""
    costs = RecordedCosts(np.array([[10.0, 12.0, 13.0]]))
    for _ in range(20):
        costs.record(1, 0, 30.0)
    for _ in range(100):
        costs.record(1, 1, 12.0)
    assert costs.of(1)[0] == pytest.approx(11.0, abs=0.2)


def test_plain_steps_take_no_longer_than_drafted_ones_without_their_draft() -> None:
    """The machine was slow while plain steps were measured, and none was recorded."""
    costs = RecordedCosts(np.array([[20.0, 20.0, 20.5]]))
    for _ in range(100):
        costs.record(1, 1, 15.0, draft_ms=4.0)
    assert costs.of(1)[:2] == pytest.approx([11.0, 15.0], abs=0.1)


def test_plain_steps_that_take_less_are_believed() -> None:
    costs = RecordedCosts(np.array([[20.0, 25.0, 25.5]]))
    for _ in range(100):
        costs.record(1, 0, 20.0)
        costs.record(1, 2, 25.5, draft_ms=1.0)
    assert costs.of(1)[0] == pytest.approx(20.0)


def test_no_step_becomes_free() -> None:
    """However much less a step took."""
    costs = make()
    for _ in range(200):
        costs.record(3, 2, 0.0)
    assert costs.of(3) == pytest.approx([0.8, 1.4, 1.8])
