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
# These numbers of nodes for a single sequence and for several, and so many steps of each in a round. On a CPU
# the times have stairs, because products compute rows in groups, so few numbers would not show where nodes
# pay. Steps of a single sequence are short, so they are measured in several rounds.
NODES, NODES_OF_SEVERAL, STEPS, ROUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16), (0, 1, 4, 8, 16), 4, 4
# No round begins after that time.
MAX_SECONDS = 1.0
# Passes over more tokens are extrapolated, since their time is proportional to their arithmetic.
MAX_TOKENS = 256


def measure_step_ms(batch: Batch, new_sequence: Callable[[], SequenceState]) -> NDArray[np.float64]:
    """[B, N+1] milliseconds of a step of 1, 2, ..., B sequences with 0, 1, ..., MAX_NODES nodes each.

    new_sequence: makes a sequence that decodes for as long as the context allows
    Whole steps are timed while decoding, since verify passes alone would find their weights in the
    processor's cache. Ends what the batch was doing.
    """
    most = batch.runner.max_num_seqs
    counts = sorted({*(1 << power for power in range(most.bit_length())), most})
    table = np.array([_measure(batch, new_sequence, count) for count in counts])
    wanted = np.arange(1, most + 1)
    return np.column_stack([np.interp(wanted, counts, column) for column in table.T])


def _measure(batch: Batch, new_sequence: Callable[[], SequenceState], num_seqs: int) -> NDArray[np.float64]:
    """[N+1]: what steps with 0, 1, ..., MAX_NODES nodes take.

    Of every number the round in which it was fastest counts, because a machine may be slow for a while. For
    the same reason a plain step takes no longer than what steps with one node take beside their draft.
    """
    sizes = NODES if num_seqs == 1 else NODES_OF_SEVERAL
    fitting = [n for n in sizes if num_seqs * (n + 1) <= MAX_TOKENS]
    found: dict[int, float] = {}
    undrafted = np.inf
    began = time.perf_counter()
    for _ in range(max(1, ROUNDS // num_seqs)):
        for size in fitting or [0]:
            by_nodes: dict[int, list[StepRecord]] = {}
            for step in _run(batch, new_sequence, num_seqs, size):
                by_nodes.setdefault(step.num_nodes // num_seqs - 1, []).append(step)
            for num_nodes, steps in by_nodes.items():
                median = float(np.median([step.step_ms for step in steps]))
                found[num_nodes] = min(found.get(num_nodes, np.inf), median)
            if 1 in by_nodes:
                rests = [s.step_ms - s.stage_ms("draft") - s.stage_ms("search") for s in by_nodes[1]]
                undrafted = min(undrafted, float(np.median(rests)))
        if time.perf_counter() - began > MAX_SECONDS:
            break
    batch.clear()
    if not found:
        # A context of two tokens leaves no room for a step.
        found[0] = 1.0
    if 0 in found:
        found[0] = min(found[0], undrafted)
    return _curve(found, num_seqs)


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


def _curve(found: dict[int, float], num_seqs: int) -> NDArray[np.float64]:
    """[N+1] milliseconds of steps with 0, 1, ..., MAX_NODES nodes from some of them.

    Other numbers are on straight lines between them, and beyond them. More nodes never take less.
    """
    sizes = np.array(sorted(found))
    times = np.maximum.accumulate([found[size] for size in sizes])
    # Where only plain steps were measured, every node is taken to cost as much as a sequence.
    slope = times[-1] / num_seqs if sizes.size == 1 else (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    every = np.arange(MAX_NODES + 1)
    curve: NDArray[np.float64] = np.interp(every, sizes, times) + slope * np.maximum(0, every - sizes[-1])
    return curve
