"""What a decode step costs on this machine, by the number of rows and of the drafts each verifies."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.batch import FixedPlan
from runtime.decoding.recorder import NullRecorder, StageRecorder

if TYPE_CHECKING:
    from runtime.decoder import SpeculativeDecoder

MAX_AUTO_NODES = 16
# Drafts a row, in turns; none leaves the draft head out.
SIZES = (0, 1, 2, 4, 6, 8, 10, 12, 14, MAX_AUTO_NODES)
STEPS = 8
ROUNDS = 3
# Steps of several rows are dearer to measure, and their times smoother.
BATCH_SIZES = (0, 1, 2, 4, 8, MAX_AUTO_NODES)
BATCH_STEPS = 4
# Wider passes are not measured but extrapolated: they cost what their arithmetic does.
MAX_MEASURED = 256


def measure_step_ms(decoder: "SpeculativeDecoder") -> NDArray[np.float64]:
    """[B, N+1] milliseconds of a step of 1, 2, ..., B rows with 0, 1, ..., ``MAX_AUTO_NODES`` drafts each.

    Takes a second or two, and a few more for many rows. Whole steps while decoding, not verify passes
    alone: those find their weights in the processor's cache. Ends what the decoder was doing.
    """
    rows = decoder.batch.num_rows
    counts = sorted({*(1 << power for power in range(rows.bit_length())), rows})
    table = np.array([_of_rows(decoder, count) for count in counts])
    wanted = np.arange(1, rows + 1)
    return np.column_stack([np.interp(wanted, counts, column) for column in table.T])


def _of_rows(decoder: "SpeculativeDecoder", num_rows: int) -> NDArray[np.float64]:
    """[N+1]: the medians of the sizes that were measured, and lines between and beyond them."""
    single = num_rows == 1
    sizes = [n for n in (SIZES if single else BATCH_SIZES) if single or num_rows * (n + 1) <= MAX_MEASURED]
    times: dict[int, list[float]] = {}
    for size in (sizes or [0]) * (ROUNDS if single else 1):
        for drafts, ms in _time_steps(decoder, num_rows, size, STEPS if single else BATCH_STEPS):
            times.setdefault(drafts, []).append(ms)
    # A context of two tokens leaves no room for a step.
    found = sorted(times) or [0]
    # More drafts never cost less: what says so is noise.
    medians = np.maximum.accumulate([float(np.median(times.get(size, 1.0))) for size in found])
    every = np.arange(MAX_AUTO_NODES + 1)
    slope = (medians[-1] - medians[0]) / max(found[-1] - found[0], 1)
    if found[-1] == 0:
        # Nothing but plain steps: as if every draft cost as much as a row.
        slope = medians[0] / num_rows
    return np.interp(every, found, medians) + slope * np.maximum(every - found[-1], 0)


def _time_steps(
    decoder: "SpeculativeDecoder", num_rows: int, size: int, count: int
) -> list[tuple[int, float]]:
    """(drafts a row, milliseconds) of ``count`` steps, after one that is not counted."""
    batch = decoder.batch
    batch.clear()
    for _ in range(num_rows):
        # Alike, so that all rows always have as many drafts and end together.
        batch.admit(decoder.row([0], max_new_tokens=decoder.max_length - 1, stop_token_ids=()))
        while batch.read_prompt() is None:
            pass
    batch.recorder = recorder = StageRecorder()
    for _ in range(count + 1):
        if batch.rows:
            batch.step(FixedPlan(size))
    batch.recorder = NullRecorder()
    batch.clear()
    return [(step.num_nodes // num_rows - 1, step.step_ms) for step in recorder.steps[1:]]
