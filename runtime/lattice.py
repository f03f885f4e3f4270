"""What a frame-synchronous draft head returns for one sequence."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


def _no_tokens() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_rows() -> NDArray[np.float32]:
    return np.zeros((0, 0, 0), np.float32)


def _no_blanks() -> NDArray[np.float32]:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class Lattice:
    """T frames, each a distribution over K labels and a blank (the rest of the mass is dropped).

    frame_tokens:   [T, K] int64, distinct within a frame, most probable first
    frame_logprobs: [T, K] float32
    blank_logprobs: [T] float32, minus infinity for a head without blanks
    previous_tokens: [P] int64, possibly with repetitions: labels whose followers are known better:
    transition_logprobs: [P, T, K] float32, of the frames' labels when that label was emitted last
    transition_blanks:   [P, T] float32
        After any other label, and for P = 0, a frame's own distribution holds.
    merges_repeats: whether a label equal to the frame's before merges with it (CTC)
    """

    frame_tokens: NDArray[np.int64]
    frame_logprobs: NDArray[np.float32]
    blank_logprobs: NDArray[np.float32]
    previous_tokens: NDArray[np.int64] = field(default_factory=_no_tokens)
    transition_logprobs: NDArray[np.float32] = field(default_factory=_no_rows)
    transition_blanks: NDArray[np.float32] = field(default_factory=_no_blanks)
    merges_repeats: bool = True
