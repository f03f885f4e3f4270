"""What a decode step costs on this machine, by the number of sequences and of draft nodes for each."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.budget.constants import DEFAULT_CONSTANTS
from runtime.decoding.batch import Batch
from runtime.decoding.sequence import SequenceState
from runtime.decoding.step import FixedBudget
from runtime.engines.recorder import StageRecorder, recording

MAX_NODES = DEFAULT_CONSTANTS.max_nodes
# Draft nodes measured for a single sequence, in turns; 0 leaves the draft head out.
SIZES = (0, 1, 2, 4, 6, 8, 10, 12, 14, MAX_NODES)
STEPS = 8
ROUNDS = 3
# Steps of several sequences take longer to measure, and their times are smoother: fewer sizes and steps do.
BATCH_SIZES = (0, 1, 2, 4, 8, MAX_NODES)
BATCH_STEPS = 4
# Passes over more tokens than this are extrapolated: their time is proportional to their arithmetic.
MAX_MEASURED_TOKENS = 256


def measure_step_ms(batch: Batch, new_sequence: Callable[[], SequenceState]) -> NDArray[np.float64]:
    """[B, N+1] milliseconds of a step of 1, 2, ..., B sequences with 0, 1, ..., ``MAX_NODES`` nodes each.

    new_sequence: makes a sequence that decodes for as long as the context allows
    Takes a second or two, and a few more for many sequences. Whole steps are timed while decoding, since
    verify passes alone would find their weights in the processor's cache. Ends what the batch was doing.
    """
    most = batch.runner.max_num_seqs
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    table = np.array([_of_sequences(batch, new_sequence, count) for count in counts])
    wanted = np.arange(1, most + 1)
    return np.column_stack([np.interp(wanted, counts, column) for column in table.T])


def _of_sequences(
    batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int
) -> NDArray[np.float64]:
    """[N+1]: the medians of the sizes that were measured, and straight lines between and beyond them."""
    single = num_seqs == 1
    rounds, steps = (ROUNDS, STEPS) if single else (1, BATCH_STEPS)
    sizes = [
        n for n in (SIZES if single else BATCH_SIZES) if single or num_seqs * (n + 1) <= MAX_MEASURED_TOKENS
    ]
    times: dict[int, list[float]] = {}
    for size in (sizes or [0]) * rounds:
        for num_nodes, ms in _time_steps(batch, new_sequence, num_seqs, size, steps):
            times.setdefault(num_nodes, []).append(ms)
    # A context of two tokens leaves no room for a step.
    measured = sorted(times) or [0]
    # More nodes never cost less: where the medians say so, that is noise.
    medians = np.maximum.accumulate([float(np.median(times.get(size, 1.0))) for size in measured])
    every = np.arange(MAX_NODES + 1)
    slope = (medians[-1] - medians[0]) / max(measured[-1] - measured[0], 1)
    if measured[-1] == 0:
        # Only plain steps were measured: every node is taken to cost as much as a sequence.
        slope = medians[0] / num_seqs
    return np.interp(every, measured, medians) + slope * np.maximum(every - measured[-1], 0)


def _time_steps(
    batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int, num_nodes: int, steps: int
) -> list[tuple[int, float]]:
    """(nodes for each sequence, milliseconds) of some steps, after one that is not counted."""
    batch.clear()
    for _ in range(num_seqs):
        # The sequences are alike, so that all have as many nodes and end together.
        batch.enter(new_sequence())
    with recording(batch.runner, StageRecorder()) as recorder:
        for _ in range(steps + 1):
            if batch.sequences:
                batch.step(FixedBudget(num_nodes))
    batch.clear()
    return [(step.num_nodes // num_seqs - 1, step.step_ms) for step in recorder.steps[1:]]
