"""The passes of an autoregressive head below the root's, on an engine: one for every level of the tree.

Draft nodes carry their parents' states and their tokens. No context is read, so A and Q are 0.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.core.level_expansion import Children, Frontier
from runtime.engines.protocol import Engine, ForwardPass


class EnginePasses:
    """The ``LevelPasses`` of one slot of an engine."""

    def __init__(
        self,
        engine: Engine,
        slot: int,
        *,
        length: int,
        states: NDArray[np.float32],
        num_depths: int,
        num_children: int | None,
    ):
        """Begin below the root.

        length: the sequence's context in the cache, behind which the draft nodes are written
        states: [1, H], the root's
        num_depths: levels that the head can draft
        num_children: as for ``best_children``
        """
        self._engine = engine
        self._slot = slot
        self._length = length
        self._states = states
        self._num_depths = num_depths
        self._num_children = num_children

    def run_nodes(self, frontier: Frontier, parents: NDArray[np.int64], depth: int) -> Children:
        count = frontier.tokens.size
        first = parents.size - count
        # Copied before the next pass is prepared, which may use the same memory.
        states = self._states[frontier.parents]
        self._engine.kv.reserve(self._length + parents.size, self._slot + 1)
        forward = self._engine.forward_pass(slot=self._slot, **pass_axes(A=0, Q=0, N=count, M=count))
        inputs = forward.inputs
        inputs["states"][0] = states
        inputs["token_ids"][0] = frontier.tokens
        # The root has the last context position.
        inputs["position_ids"][0] = self._length - 1 + depth
        inputs["write_index"][0] = self._length + first
        forward.mask_tree([parents], [self._length], first)
        forward.run()
        self._states = forward.outputs["new_states"][0]
        return best_children(forward, self._num_children)

    def run_paths(self, paths: NDArray[np.int64]) -> Children:
        count, depth = paths.shape[0], paths.shape[1] - 1
        axes = pass_axes(A=0, Q=0, N=1, M=count) | depth_axes(self._num_depths, depth, count)
        forward = self._engine.forward_pass(**axes)
        # The root's state serves all nodes.
        forward.inputs["states"][0] = self._states
        forward.inputs[f"path_ids_{depth}"][0] = paths
        if "write_index" in forward.inputs:
            # No context is read, so nothing is written.
            forward.inputs["write_index"][0] = 0
        forward.run()
        return best_children(forward, self._num_children)


def best_children(forward: ForwardPass, num_children: int | None) -> Children:
    """The children that a pass has found, of every node the best ``num_children``; None: all of them."""
    tokens, log_probs = forward.outputs["child_tokens"][0], forward.outputs["child_logprobs"][0]
    if num_children is None:
        return Children(tokens, log_probs)
    best = slice(num_children)
    return Children(np.ascontiguousarray(tokens[:, best]), np.ascontiguousarray(log_probs[:, best]))


def pass_axes(*, A: int, Q: int, N: int, M: int) -> dict[str, int]:
    """Sizes of a pass: A tokens of context, Q of them queried, N states given, M nodes with children."""
    return {"B": 1, "A": A, "Q": Q, "N": N, "P": Q + N, "M": M}


def depth_axes(num_depths: int, depth: int, count: int) -> dict[str, int]:
    """Nodes of every depth where only one depth has any: M0, M1, ..."""
    return {f"M{d}": count if d == depth else 0 for d in range(num_depths)}
