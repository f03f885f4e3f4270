"""What a decode step costs on this machine, by the number of sequences and of draft nodes for each."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.decode.batch import Batch
from runtime.decode.budget import DEFAULT_CONSTANTS, BudgetConstants, FixedBudget
from runtime.decode.sequence import SequenceState
from runtime.engines.recorder import StageRecorder, recording


def measure_step_ms(
    batch: Batch,
    new_sequence: Callable[[], SequenceState],
    constants: BudgetConstants = DEFAULT_CONSTANTS,
) -> NDArray[np.float64]:
    """[B, N+1] milliseconds of a step of 1, 2, ..., B sequences with 0, 1, ..., ``max_nodes`` nodes each.

    new_sequence: makes a sequence that decodes for as long as the context allows
    Takes a second or two, and a few more for many sequences. Whole steps are timed while decoding, since
    verify passes alone would find their weights in the processor's cache. Ends what the batch was doing.
    """
    most = batch.runner.max_num_seqs
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    table = np.array([_measure(batch, new_sequence, count, constants) for count in counts])
    wanted = np.arange(1, most + 1)
    return np.column_stack([np.interp(wanted, counts, column) for column in table.T])


def _measure(
    batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int, constants: BudgetConstants
) -> NDArray[np.float64]:
    """[N+1]: the medians of the sizes that were measured, and straight lines between and beyond them."""
    fitting = [n for n in constants.measured_nodes if num_seqs * (n + 1) <= constants.max_measured_tokens]
    times: dict[int, list[float]] = {}
    # Steps of a single sequence are short and noisy, so they are measured in several rounds.
    for size in (fitting or [0]) * max(1, constants.measured_rounds // num_seqs):
        batch.clear()
        for _ in range(num_seqs):
            # The sequences are alike, so that all have as many nodes and end together.
            batch.enter(new_sequence())
        with recording(batch.runner, StageRecorder(wants_stages=False)) as recorder:
            for _ in range(constants.measured_steps + 1):
                if batch.sequences:
                    batch.step(FixedBudget(size))
        for step in recorder.steps[1:]:
            times.setdefault(step.num_nodes // num_seqs - 1, []).append(step.step_ms)
    batch.clear()
    # A context of two tokens leaves no room for a step.
    measured = sorted(times) or [0]
    # More nodes never cost less: where the medians say so, that is noise.
    medians = np.maximum.accumulate([float(np.median(times.get(size, 1.0))) for size in measured])
    every = np.arange(constants.max_nodes + 1)
    slope = (medians[-1] - medians[0]) / max(measured[-1] - measured[0], 1)
    if measured[-1] == 0:
        # Only plain steps were measured: every node is taken to cost as much as a sequence.
        slope = medians[0] / num_seqs
    return np.interp(every, measured, medians) + slope * np.maximum(every - measured[-1], 0)
