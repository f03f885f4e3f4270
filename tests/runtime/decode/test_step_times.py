"""Measuring steps, by a clock that only a fake runner's steps move on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.decode.batch import Batch
from runtime.decode.sequence import SequenceState
from runtime.decode.step import NumVerified, StepResult
from runtime.decode.step_times import MAX_NODES, measure_step_ms
from runtime.engines.recorder import NullRecorder, Recorder
from tests.fakes import FakeDecoder

NUM_SIZES = MAX_NODES + 1
# From the numbers of sequences and of inputs of each to a step's milliseconds.
Cost = Callable[[int, int], float]


class TimedRunner:
    """A ``StepRunner`` without a model: every step takes what ``cost`` says and gives a token each.

    most: nodes that its draft head finds for a sequence
    draft_ms: what a draft takes of a step
    slots: those that hold a sequence
    """

    prefill_chunk_size = 512
    tree_sizes: Sequence[int] = ()
    scores_prompts = False

    def __init__(self, cost: Cost, max_num_seqs: int, most: int, draft_ms: float):
        self.max_num_seqs = max_num_seqs
        self.recorder: Recorder = NullRecorder()
        self.ns = 0
        self.slots: set[int] = set()
        self._cost, self._most, self._draft_ms = cost, most, draft_ms

    def perf_counter_ns(self) -> int:
        return self.ns

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        self.slots.add(slot)
        return self._result(1, 0)

    def step(
        self, sequences: Sequence[SequenceState], num_nodes: int, num_verified: NumVerified | None = None
    ) -> StepResult:
        self.recorder.begin()
        num_nodes = min(num_nodes, self._most)
        draft_ms = self._draft_ms if num_nodes else 0.0
        self.ns += round(1e6 * draft_ms)
        self.recorder.mark("draft")
        self.ns += round(1e6 * (self._cost(len(sequences), 1 + num_nodes) - draft_ms))
        self.recorder.end(len(sequences), len(sequences) * (1 + num_nodes), 0)
        return self._result(len(sequences), num_nodes)

    def swap(self, first: int, second: int, lengths: tuple[int, int]) -> None:
        exchanged = {first: second, second: first}
        self.slots = {exchanged.get(slot, slot) for slot in self.slots}

    def keep_prefixes(self, max_bytes: int) -> int:
        return 0

    def save_block(self, slot: int, start: int, end: int) -> None:
        raise NotImplementedError

    def load_blocks(self, slot: int, tokens: NDArray[np.int64], blocks: Sequence[Any]) -> None:
        raise NotImplementedError

    def release(self, slot: int) -> None:
        self.slots.discard(slot)

    def close(self) -> None:
        self.slots.clear()

    def _result(self, num_seqs: int, num_nodes: int) -> StepResult:
        tokens = np.full((num_seqs, 1), 7)
        return StepResult(
            tokens, np.ones(num_seqs, np.int64), ((),) * num_seqs, np.zeros((num_seqs, num_nodes))
        )


def measure(
    monkeypatch: pytest.MonkeyPatch,
    cost: Cost,
    max_num_seqs: int,
    *,
    max_new_tokens: int = 100,
    most: int = 99,
    draft_ms: float = 0.0,
) -> NDArray[np.float64]:
    runner = TimedRunner(cost, max_num_seqs, most, draft_ms)
    before = runner.recorder
    monkeypatch.setattr("runtime.engines.recorder.time", runner)
    batch, decoder = Batch(runner), FakeDecoder()
    found = measure_step_ms(
        batch, lambda: decoder.new_sequence([5, 6], max_new_tokens=max_new_tokens, stop_token_ids=())
    )
    assert found.shape == (max_num_seqs, NUM_SIZES)
    assert np.all(np.diff(found, axis=1) >= 0)
    # Nothing is left of it.
    assert runner.recorder is before
    assert (batch.sequences, batch.prefilling, runner.slots) == ([], [], set())
    return found


def linear(num_seqs: int, size: int) -> float:
    return 2.0 + 0.5 * num_seqs + 0.25 * num_seqs * size


def table(cost: Cost, num_seqs: int) -> NDArray[np.float64]:
    return np.array([[cost(n, size) for size in range(1, NUM_SIZES + 1)] for n in range(1, num_seqs + 1)])


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 6, 32])
def test_every_number_of_sequences_and_nodes(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int) -> None:
    """Numbers that are not measured lie on straight lines between those that are, and beyond them."""
    found = measure(monkeypatch, linear, max_num_seqs)
    np.testing.assert_allclose(found, table(linear, max_num_seqs), rtol=1e-6)


def test_plain_steps_are_extrapolated_where_nothing_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass over very many sequences, every node is taken to cost as much as a sequence."""
    num_seqs = 300
    found = measure(monkeypatch, linear, num_seqs)[-1]
    plain = linear(num_seqs, 1)
    np.testing.assert_allclose(found, plain + plain / num_seqs * np.arange(NUM_SIZES))


def test_the_median_of_the_steps_counts_and_the_first_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in seven is slow, and so is the first one of a size."""
    previous, count = 0, 0

    def cost(num_seqs: int, size: int) -> float:
        nonlocal previous, count
        is_first, previous, count = size != previous, size, count + 1
        return 1000.0 if is_first or count % 7 == 0 else linear(num_seqs, size)

    np.testing.assert_allclose(measure(monkeypatch, cost, 2), table(linear, 2))


def test_stairs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products compute rows in groups of four: up to three nodes cost next to nothing."""

    def cost(num_seqs: int, size: int) -> float:
        return 3.0 + -(-size // 4)

    found = measure(monkeypatch, cost, 1)[0]
    np.testing.assert_allclose(found[:5], [4.0, 4.0, 4.0, 4.0, 5.0])
    np.testing.assert_allclose(found[[8, 12, 16]], [6.0, 7.0, 8.0])


def test_the_fastest_round_of_a_number_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is slow for as long as all numbers with drafts take once."""
    count = 0

    def cost(num_seqs: int, size: int) -> float:
        nonlocal count
        count += size > 1
        return linear(num_seqs, size) * (1.0 + (20 < count <= 60))

    np.testing.assert_allclose(measure(monkeypatch, cost, 1), table(linear, 1))


def test_more_nodes_never_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, lambda num_seqs, size: 10.0 - 0.1 * size, 1)
    np.testing.assert_allclose(found, 9.8)  # of the step with one node


def test_a_head_that_finds_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts as what it verified; more nodes are on the straight line."""
    found = measure(monkeypatch, linear, 2, most=3)
    np.testing.assert_allclose(found, table(linear, 2))


def test_a_machine_that_was_slow_while_plain_steps_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step takes no longer than one with a node does without its draft."""

    def cost(num_seqs: int, size: int) -> float:
        return 50.0 if size == 1 else 30.0 + size

    found = measure(monkeypatch, cost, 1, draft_ms=5.0)
    np.testing.assert_allclose(found[0], [27.0, *range(32, 31 + NUM_SIZES)])


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_a_context_that_leaves_no_room(monkeypatch: pytest.MonkeyPatch, max_new_tokens: int) -> None:
    """The sequences end before a step can be timed."""
    found = measure(monkeypatch, linear, 3, max_new_tokens=max_new_tokens)
    assert np.isfinite(found).all()
    assert (found > 0).all()
