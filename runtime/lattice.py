"""What a frame-synchronous draft head returns for one sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Lattice:
    """T frames, each a distribution over K labels and a blank (the rest of the mass is dropped).

    frame_tokens:   [T, K] int64, distinct within a frame, most probable first
    frame_logprobs: [T, K] float32
    blank_logprobs: [T] float32
    """

    frame_tokens: NDArray[np.int64]
    frame_logprobs: NDArray[np.float32]
    blank_logprobs: NDArray[np.float32]
