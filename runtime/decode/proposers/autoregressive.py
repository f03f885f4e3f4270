"""Autoregressive draft heads at run time: one pass for the root, one for every further level of a tree.

The head's graph reads new context (features, and for EAGLE the tokens after theirs) or draft nodes (their
parents' states and their tokens), and returns the best children of every node:

    features              [1, A, F*H]    query_indices   [1, Q]    states  [1, N, H]
    context_position_ids  [1, A]         write_index     [1]       attn_mask      with a cache
    context_token_ids     [1, A]         token_ids, position_ids  [1, N]          EAGLE
    path_ids_d            [1, M_d, d+1]  for every depth d                        Hydra
    ->
    child_tokens, child_logprobs  [1, M, K]         new_states  [1, P, H], P = Q + N

In the root's pass Q is 1 and N is 0, in all others A and Q are 0. EAGLE has a state for every node (N = M);
Hydra has one state for all of them, and a head of its own for every depth.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.level_expansion import Children, EagleLevels, Frontier, HydraLevels, Levels, expand_tree
from runtime.core.token_tree import TokenTree
from runtime.decode.proposers.base import HeadSlots, PendingContext
from runtime.engines.protocol import Engine, Features, ForwardPass
from runtime.engines.recorder import Recorder


class AutoregressiveProposer(HeadSlots):
    """``hydra`` and ``eagle`` heads.

    Sequences take turns: the passes of a level are small already, and every tree has levels of its own. How
    many levels there are, and how wide, follows from the number of nodes asked for. The head's cache
    positions of draft nodes are overwritten by the next context.

    max_depth: levels the head can draft
    beam_width: nodes of a level that are expanded at most
    num_children: children of a node that may become drafts; None for all that the graph returns
    min_level_probability: a level that is reached with a smaller probability is left out
    heads_per_depth: whether each depth has a head of its own (Hydra), or all have one (EAGLE)
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_depth: int,
        beam_width: int,
        min_level_probability: float,
        heads_per_depth: bool,
        num_children: int | None = None,
        max_num_seqs: int = 1,
    ):
        super().__init__(engine, max_num_seqs)
        self.max_depth = max_depth
        self.beam_width = beam_width
        self.min_level_probability = min_level_probability
        self._heads_per_depth = heads_per_depth
        self.num_children = num_children

    def append_context(
        self, slots: Sequence[int], token_ids: Sequence[NDArray[np.int64]], features: Features
    ) -> None:
        if self._has_layers:
            super().append_context(slots, token_ids, features)
            return
        # The head reads the last feature only.
        for slot, tokens, block in zip(slots, token_ids, features.to_host(), strict=True):
            self._pending[slot] = PendingContext()
            self._pending[slot].append(tokens[-1:], block[-1:])

    def propose(self, last_tokens: Sequence[int], num_nodes: int, recorder: Recorder) -> list[TokenTree]:
        self._reserve(len(last_tokens), num_nodes)
        trees = [self._tree(slot, token, num_nodes) for slot, token in enumerate(last_tokens)]
        recorder.mark("draft")
        return trees

    def _reserve(self, num_slots: int, num_nodes: int) -> None:
        """Make room for a draft of the first slots, before anything of them is read."""
        if not self._has_layers:
            return
        longest = max(self._lengths[slot] + self._pending[slot].num_tokens for slot in range(num_slots))
        # Hydra's nodes are not in the cache.
        width = 0 if self._heads_per_depth else min(self.beam_width, num_nodes)
        self.engine.kv.fit(longest + width * (self.max_depth - 1), num_slots)

    def _tree(self, slot: int, token: int, num_nodes: int) -> TokenTree:
        """Read a slot's context, and expand the tree below its last token."""
        forward = self._read(slot, *self.unread(slot), token)
        self._pending[slot] = PendingContext()
        children = best_children(forward, self.num_children)
        # A copy, because the next passes use the same memory.
        states = forward.outputs["new_states"][0].copy()
        passes = EnginePasses(self, slot, self._lengths[slot], states)
        levels: Levels = HydraLevels(passes, token) if self._heads_per_depth else EagleLevels(passes)
        return expand_tree(
            levels,
            token,
            children,
            num_nodes=num_nodes,
            max_depth=self.max_depth,
            beam_width=self.beam_width,
            min_level_probability=self.min_level_probability,
        )

    def _read(
        self, slot: int, tokens: NDArray[np.int64], features: NDArray[np.float32], following: int
    ) -> ForwardPass:
        count, start = tokens.size, self._lengths[slot]
        if self._has_layers:
            self.engine.kv.reserve(start + count, slot + 1)
        axes = pass_axes(A=count, Q=1, N=0, M=1)
        if self._heads_per_depth:
            axes |= depth_axes(self.max_depth, 0, 1)
        forward = self.engine.forward_pass(slot=slot, **axes)
        inputs = forward.inputs
        inputs["features"][0] = features
        inputs["query_indices"][0, 0] = count - 1
        if self._heads_per_depth:
            inputs["path_ids_0"][0, 0, 0] = following
        else:
            inputs["context_token_ids"][0, :-1] = tokens[1:]
            inputs["context_token_ids"][0, -1] = following
        if self._has_layers:
            inputs["context_position_ids"][0] = np.arange(start, start + count)
            inputs["write_index"][0] = start
            # The query, the last new token, attends to all of the context.
            forward.mask_causal([start + count - 1])
            self._lengths[slot] += count
        forward.run()
        return forward


class EnginePasses:
    """The ``LevelPasses`` of one slot of a head's engine, one for every level below the root.

    Draft nodes carry their parents' states and their tokens. No context is read, so A and Q are 0.
    """

    def __init__(self, head: AutoregressiveProposer, slot: int, length: int, states: NDArray[np.float32]):
        """length: the sequence's context in the cache, behind which the draft nodes are written

        states: [1, H], the root's
        """
        self._head = head
        self._slot = slot
        self._length = length
        self._states = states

    def run_nodes(self, frontier: Frontier, parents: NDArray[np.int64], depth: int) -> Children:
        count = frontier.tokens.size
        first = parents.size - count
        # Copied before the next pass is prepared, which may use the same memory.
        states = self._states[frontier.parents]
        forward = self._head.engine.forward_pass(slot=self._slot, **pass_axes(A=0, Q=0, N=count, M=count))
        inputs = forward.inputs
        inputs["states"][0] = states
        inputs["token_ids"][0] = frontier.tokens
        # The root has the last context position.
        inputs["position_ids"][0] = self._length - 1 + depth
        inputs["write_index"][0] = self._length + first
        forward.mask_tree([parents], [self._length], first)
        forward.run()
        self._states = forward.outputs["new_states"][0]
        return best_children(forward, self._head.num_children)

    def run_paths(self, paths: NDArray[np.int64]) -> Children:
        count, depth = paths.shape[0], paths.shape[1] - 1
        axes = pass_axes(A=0, Q=0, N=1, M=count) | depth_axes(self._head.max_depth, depth, count)
        forward = self._head.engine.forward_pass(**axes)
        # The root's state serves all nodes.
        forward.inputs["states"][0] = self._states
        forward.inputs[f"path_ids_{depth}"][0] = paths
        if "write_index" in forward.inputs:
            # No context is read, so nothing is written.
            forward.inputs["write_index"][0] = 0
        forward.run()
        return best_children(forward, self._head.num_children)


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
