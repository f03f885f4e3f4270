"""What a decode step costs on this machine, by the number of drafts it verifies."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.stages import NullRecorder, StageRecorder

if TYPE_CHECKING:
    from runtime.decoder import SpeculativeDecoder

MAX_AUTO_NODES = 16
# These tree sizes in turns, each for so many tokens.
SIZES = (1, 2, 4, 6, 8, 10, 12, 14, MAX_AUTO_NODES)
TOKENS = 24
ROUNDS = 3


def measure_step_ms(decoder: "SpeculativeDecoder") -> NDArray[np.float64]:
    """Milliseconds of a step with 0, 1, ..., ``MAX_AUTO_NODES`` drafts; takes a second or two.

    Whole steps while decoding, not verify passes alone: those find their weights in the processor's
    cache. Leaves ``decoder.num_nodes`` at one of ``SIZES``.
    """
    times: dict[int, list[float]] = {}
    for size in SIZES * ROUNDS:
        decoder.num_nodes = size
        decoder.recorder = recorder = StageRecorder()
        decoder.discard(TOKENS)
        for begin, _, end, rows, _ in recorder.steps:
            times.setdefault(rows - 1, []).append((end - begin) / 1e6)
    decoder.recorder = NullRecorder()
    # A context of two tokens leaves no room for a step.
    sizes = sorted(times) or [0]
    medians = [float(np.median(times.get(size, 1.0))) for size in sizes]
    # More rows never cost less: what says so is noise.
    return np.interp(np.arange(MAX_AUTO_NODES + 1), sizes, np.maximum.accumulate(medians))
