"""The passes of a sequential head below the anchor's: one for every level of the tree.

Draft rows carry their parents' states and their tokens; no context is read, so A and Q are 0.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engines.base import Engine, Step
from runtime.trees.level_expansion import Frontier
from runtime.trees.token_tree import fill_tree_mask


class Levels(Protocol):
    """One draft's levels, called from the top down."""

    def expand(self, frontier: Frontier) -> Step:
        """Run the pass of a level's nodes; ``frontier.rows`` are rows of the pass before it."""
        ...


class EagleLevels:
    """Every row attends to the context and its ancestors, whose rows follow the context in the cache."""

    def __init__(self, engine: Engine, row: int, length: int, states: NDArray[np.float32]):
        """row: of the sequence; length: its context in the cache; states [1, H]: the anchor's"""
        self._engine = engine
        self._row = row
        self._length = length
        self._states = states
        # Of all draft rows so far: each one's parent among them.
        self._parents = np.empty(0, np.int64)
        self._depth = 0

    def expand(self, frontier: Frontier) -> Step:
        self._depth += 1
        count, first = frontier.tokens.size, self._parents.size
        # The last rows so far are the level before; the anchor's row is not among them: -1.
        above = frontier.rows + (first - self._states.shape[0])
        self._parents = np.append(self._parents, above)
        self._engine.kv.reserve(self._length + first + count, self._row + 1)
        step = self._engine.step(row=self._row, **pass_axes(A=0, Q=0, N=count, M=count))
        inputs = step.inputs
        inputs["states"][0] = self._states[frontier.rows]
        inputs["token_ids"][0] = frontier.tokens
        # The anchor's row stands at the last context position.
        inputs["position_ids"][0] = self._length - 1 + self._depth
        inputs["write_index"][0] = self._length + first
        fill_tree_mask(inputs["attn_mask"][0, 0], self._parents, self._length, first)
        step.run()
        self._states = step.outputs["new_states"][0]
        return step


class HydraLevels:
    """Every depth has a head of its own, which reads the whole path; one state serves all rows."""

    def __init__(self, engine: Engine, num_depths: int, states: NDArray[np.float32], anchor: int):
        """states [1, H]: the anchor's"""
        self._engine = engine
        self._num_depths = num_depths
        self._states = states
        self._paths = np.array([[anchor]])

    def expand(self, frontier: Frontier) -> Step:
        self._paths = np.column_stack((self._paths[frontier.rows], frontier.tokens))
        count, length = self._paths.shape
        depth = length - 1
        axes = pass_axes(A=0, Q=0, N=1, M=count) | depth_axes(self._num_depths, depth, count)
        step = self._engine.step(**axes)
        step.inputs["states"][0] = self._states
        step.inputs[f"path_ids_{depth}"][0] = self._paths
        step.run()
        return step


def pass_axes(*, A: int, Q: int, N: int, M: int) -> dict[str, int]:
    """Sizes of a pass: A context rows, Q of them roots, N states given, M rows with children."""
    return {"B": 1, "A": A, "Q": Q, "N": N, "P": Q + N, "M": M}


def depth_axes(num_depths: int, depth: int, count: int) -> dict[str, int]:
    """Rows of every depth where only one has any: M0, M1, ..."""
    return {f"M{d}": count if d == depth else 0 for d in range(num_depths)}
