"""What a parallel draft head returns for one sequence."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree


def _empty(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


@dataclass(frozen=True)
class Transition:
    """How the frames of a lattice depend on the label emitted before.

    After label y, the log-probability of candidate k of frame t changes by

        D(t, y, k) = h(t, y) . following[t, k],    h(t, y) = silu(frames[t] + y's row), or y's row alone

    and then frame t is normalised again, together with the mass outside the candidates.

    frames:    [T, r] float32, or [T, 0] where all frames are alike
    root:      [r] float32, the root token's row
    previous:  [T, K, r] float32, rows of the frames' labels
    following: [T, K, r] float32, or [T, K + 1, r], the last the blank's
    """

    frames: NDArray[np.float32]
    root: NDArray[np.float32]
    previous: NDArray[np.float32]
    following: NDArray[np.float32]


NO_TRANSITION = Transition(_empty(0, 0), _empty(0), _empty(0, 0, 0), _empty(0, 0, 0))


@dataclass(frozen=True)
class Lattice:
    """T frames, each with its K most probable labels and a blank; the rest of the mass is dropped.

    frame_tokens:   [T, K] int64, distinct within a frame, most probable first
    frame_logprobs: [T, K] float32
    blank_logprobs: [T] float32, minus infinity for a head without blanks
    transition: how the label before changes these probabilities, which are those without it
    merges_repeats: whether a label that repeats the one of the frame before merges with it (CTC)
    """

    frame_tokens: NDArray[np.int64]
    frame_logprobs: NDArray[np.float32]
    blank_logprobs: NDArray[np.float32]
    transition: Transition = NO_TRANSITION
    merges_repeats: bool = True

    @classmethod
    def of_outputs(cls, outputs: Mapping[str, NDArray[Any]], *, merges_repeats: bool) -> Self:
        """From a drafter graph's outputs for one sequence, by name (``drafters.lattice``)."""
        tokens = outputs["frame_tokens"]
        num_frames = tokens.shape[0]
        transition = NO_TRANSITION
        if "transition_following" in outputs:
            frames = outputs.get("transition_frames")
            transition = Transition(
                _empty(num_frames, 0) if frames is None else frames,
                outputs["transition_anchor"],
                outputs["transition_previous"],
                outputs["transition_following"],
            )
        blanks = outputs.get("blank_logprobs")
        if blanks is None:
            blanks = np.full(num_frames, -np.inf, np.float32)
        return cls(tokens, outputs["frame_logprobs"], blanks, transition, merges_repeats)


class Search(Protocol):
    """Makes a tree of at most ``num_nodes`` drafts below ``root_token`` from a lattice."""

    def __call__(self, lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree: ...
