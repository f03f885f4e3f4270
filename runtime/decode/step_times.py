"""What a decode step costs on this machine, by the number of sequences and of draft nodes for each."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from runtime.decode.batch import Batch
from runtime.decode.budget import FixedBudget
from runtime.decode.sequence import SequenceState
from runtime.engines.recorder import StageRecorder, StepRecord, recording

# What loading a decoder times. More of each makes loading slower.
# The largest tree that is considered. On a CPU steps cost more with every node, and 16 nodes are slower than
# 8 with the demo model (README).
MAX_NODES = 16
# These numbers of nodes, so many steps of each, in so many rounds for a single sequence.
NODES, STEPS, ROUNDS = (0, 1, 4, 8, 16), 4, 4
# No round begins after that time.
MAX_SECONDS = 1.0
# Passes over more tokens are extrapolated, since their time is proportional to their arithmetic.
MAX_TOKENS = 256


def measure_step_ms(batch: Batch, new_sequence: Callable[[], SequenceState]) -> NDArray[np.float64]:
    """[B, N+1] milliseconds of a step of 1, 2, ..., B sequences with 0, 1, ..., MAX_NODES nodes each.

    new_sequence: makes a sequence that decodes for as long as the context allows
    Takes a second or two, and a few more for many sequences. Whole steps are timed while decoding, since
    verify passes alone would find their weights in the processor's cache. Ends what the batch was doing.
    """
    most = batch.runner.max_num_seqs
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    table = np.array([_measure(batch, new_sequence, count) for count in counts])
    wanted = np.arange(1, most + 1)
    return np.column_stack([np.interp(wanted, counts, column) for column in table.T])


def _measure(batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int) -> NDArray[np.float64]:
    """[N+1]: the median of plain steps, and a smooth curve through the medians of those with drafts.

    A machine that was slow for a while must not make drafts seem to cost nothing. So a plain step takes no
    longer than what steps with one node take beside their draft.
    """
    fitting = [n for n in NODES if num_seqs * (n + 1) <= MAX_TOKENS]
    times: dict[int, list[float]] = {}
    undrafted: list[float] = []
    began = time.perf_counter()
    # Steps of a single sequence are short and noisy, so they are measured in several rounds.
    for _ in range(max(1, ROUNDS // num_seqs)):
        for size in fitting or [0]:
            for step in _run(batch, new_sequence, num_seqs, size):
                num_nodes = step.num_nodes // num_seqs - 1
                times.setdefault(num_nodes, []).append(step.step_ms)
                if num_nodes == 1:
                    undrafted.append(step.step_ms - step.stage_ms("draft") - step.stage_ms("search"))
        if time.perf_counter() - began > MAX_SECONDS:
            break
    batch.clear()
    # A context of two tokens leaves no room for a step.
    medians = {size: float(np.median(times.get(size, 1.0))) for size in sorted(times) or [0]}
    if undrafted and 0 in medians:
        medians[0] = min(medians[0], float(np.median(undrafted)))
    return _curve(medians, num_seqs)


def _run(
    batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int, size: int
) -> list[StepRecord]:
    """Some steps with ``size`` nodes, or with as many as were found."""
    batch.clear()
    for _ in range(num_seqs):
        # The sequences are alike, so that all have as many nodes and end together.
        batch.enter(new_sequence())
    with recording(batch.runner, StageRecorder(wants_stages=False)) as recorder:
        for _ in range(STEPS + 1):
            if batch.sequences:
                batch.step(FixedBudget(size))
    return recorder.steps[1:]


def _curve(medians: dict[int, float], num_seqs: int) -> NDArray[np.float64]:
    """[N+1] milliseconds of steps with 0, 1, ..., MAX_NODES nodes from some of them.

    Steps with drafts are on the parabola that fits best, since single medians are wrong by a tenth. Every
    further node costs something, and no less than the one before.
    """
    every = np.arange(MAX_NODES + 1)
    plain = medians.get(0, min(medians.values()))
    drafted = {size: ms for size, ms in medians.items() if size}
    if not drafted:
        # Only plain steps were measured: every node is taken to cost as much as a sequence.
        return plain + plain / num_seqs * every
    if len(drafted) == 1:
        drafted = medians
    sizes, times = np.array(list(drafted)), np.array(list(drafted.values()))
    for degree in (2, 1, 0):
        fit = np.polynomial.Polynomial.fit(sizes, times, min(degree, sizes.size - 1), domain=[])
        curve = fit(every)
        rises = np.diff(curve[1:])
        if (rises >= 0).all() and (np.diff(rises) >= -1e-9).all():
            break
    curve = np.maximum(curve, plain)
    curve[0] = plain
    return curve
