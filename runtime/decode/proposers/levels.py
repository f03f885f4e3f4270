"""The passes of an autoregressive head below the root's: one for every level of the tree.

Draft nodes carry their parents' states and their tokens. No context is read, so A and Q are 0.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.level_expansion import Frontier
from runtime.engines.protocol import Engine, ForwardPass


class Levels(Protocol):
    """The levels of one tree, called from the top down."""

    def expand(self, frontier: Frontier) -> ForwardPass:
        """Run the pass of a level's nodes; ``frontier.parents`` index the nodes of the pass before it."""
        ...


class EagleLevels:
    """Every node attends to the context and its ancestors, which follow the context in the cache."""

    def __init__(self, engine: Engine, slot: int, length: int, states: NDArray[np.float32]):
        """length: the sequence's context in the cache; states [1, H]: the root's"""
        self._engine = engine
        self._slot = slot
        self._length = length
        self._states = states
        # The parent of each node so far, as an index among them.
        self._parents = np.empty(0, np.int64)
        self._depth = 0

    def expand(self, frontier: Frontier) -> ForwardPass:
        self._depth += 1
        count, first = frontier.tokens.size, self._parents.size
        # The last nodes so far are the level above. The root is not among them, which gives its children -1.
        above = frontier.parents + (first - self._states.shape[0])
        self._parents = np.append(self._parents, above)
        # Copied before the next pass is prepared, which may use the same memory.
        states = self._states[frontier.parents]
        self._engine.kv.reserve(self._length + first + count, self._slot + 1)
        forward = self._engine.forward_pass(slot=self._slot, **pass_axes(A=0, Q=0, N=count, M=count))
        inputs = forward.inputs
        inputs["states"][0] = states
        inputs["token_ids"][0] = frontier.tokens
        # The root stands at the last context position.
        inputs["position_ids"][0] = self._length - 1 + self._depth
        inputs["write_index"][0] = self._length + first
        forward.mask_tree([self._parents], [self._length], first)
        forward.run()
        self._states = forward.outputs["new_states"][0]
        return forward


class HydraLevels:
    """Every depth has a head of its own, which reads the whole path; one state serves all nodes."""

    def __init__(self, engine: Engine, num_depths: int, states: NDArray[np.float32], root_token: int):
        """states [1, H]: the root's"""
        self._engine = engine
        self._num_depths = num_depths
        self._states = states
        self._paths = np.array([[root_token]])

    def expand(self, frontier: Frontier) -> ForwardPass:
        self._paths = np.column_stack((self._paths[frontier.parents], frontier.tokens))
        count, length = self._paths.shape
        depth = length - 1
        axes = pass_axes(A=0, Q=0, N=1, M=count) | depth_axes(self._num_depths, depth, count)
        forward = self._engine.forward_pass(**axes)
        forward.inputs["states"][0] = self._states
        forward.inputs[f"path_ids_{depth}"][0] = self._paths
        if "write_index" in forward.inputs:
            # No context is read, so nothing is written.
            forward.inputs["write_index"][0] = 0
        forward.run()
        return forward


def pass_axes(*, A: int, Q: int, N: int, M: int) -> dict[str, int]:
    """Sizes of a pass: A tokens of context, Q of them queried, N states given, M nodes with children."""
    return {"B": 1, "A": A, "Q": Q, "N": N, "P": Q + N, "M": M}


def depth_axes(num_depths: int, depth: int, count: int) -> dict[str, int]:
    """Nodes of every depth where only one depth has any: M0, M1, ..."""
    return {f"M{d}": count if d == depth else 0 for d in range(num_depths)}
