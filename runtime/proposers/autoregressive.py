"""Sequential draft heads at run time: one pass for the anchor, one for every further level of a tree.

The head's graph reads new context rows (features, and for EAGLE the tokens after theirs) or draft
rows (their parents' states and their tokens), and returns every row's best children:

    features              [1, A, F*H]    query_indices   [1, Q]    states  [1, N, H]
    context_position_ids  [1, A]         write_index     [1]       attn_mask      with a cache
    context_token_ids     [1, A]         token_ids, position_ids  [1, N]          EAGLE
    path_ids_d            [1, M_d, d+1]  for every depth d                        Hydra
    ->
    child_tokens, child_logprobs  [1, M, K]         new_states  [1, P, H], P = Q + N

In the anchor's pass Q is 1 and N is 0, in all others A and Q are 0. EAGLE has a state for every row
(N = M); Hydra one for all of them, and a head of its own for every depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.engines.base import Engine, Step
from runtime.proposers.base import MAX_WAITING, HeadSlots
from runtime.proposers.levels import EagleLevels, HydraLevels, Levels, depth_axes, pass_axes
from runtime.trees.level_expansion import TreeExpansion
from runtime.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Roots:
    """What a row's anchor pass found: children [1, K] with log-probabilities, and its state [1, H]."""

    row: int
    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    states: NDArray[np.float32]


class AutoregressiveProposer(HeadSlots):
    """``hydra`` and ``eagle``: ``draft`` runs the anchors' passes, ``transform`` grows a tree.

    Rows take turns: a level's passes are small already, and every row has levels of its own.

    How many levels there are, and how wide, follows from the size of the tree that is asked for; the
    head's cache rows of draft tokens are overwritten by the next context.

    max_depth: levels the head can draft
    beam_width: nodes of a level that are expanded at most
    min_level_probability: probability of reaching a level below which it is left out
    heads_per_depth: whether each depth has a head of its own (Hydra), or all have one (EAGLE)
    has_cache: whether the head attends to the context; otherwise it reads the last feature only
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_depth: int,
        beam_width: int,
        min_level_probability: float,
        heads_per_depth: bool,
        has_cache: bool,
        num_rows: int = 1,
    ):
        super().__init__(engine, num_rows)
        self.max_depth = max_depth
        self.beam_width = beam_width
        self.min_level_probability = min_level_probability
        self._heads_per_depth = heads_per_depth
        self._has_cache = has_cache

    def observe(self, row: int, token_ids: NDArray[np.int64], features: NDArray[np.float32]) -> None:
        if not self._has_cache:
            self._pending[row] = [(token_ids[-1:].copy(), features[-1:].copy())]
            return
        if self._num_pending[row] >= MAX_WAITING:
            self._read(row, int(token_ids[0]))
        self._pending[row].append((token_ids.copy(), features.copy()))
        self._num_pending[row] += token_ids.size

    def draft(self, anchors: Sequence[int], num_nodes: int) -> list[Roots]:
        roots = []
        for row, anchor in enumerate(anchors):
            if not self._pending[row]:
                raise RuntimeError("draft() needs features: call observe() first")
            step = self._read(row, anchor)
            # Copies: the next row's pass uses the same buffers.
            tokens, log_probs = _children(step)
            states = step.outputs["new_states"][0]
            roots.append(Roots(row, tokens.copy(), log_probs.copy(), states.copy()))
        return roots

    def transform(self, proposal: Roots, *, anchor: int, num_nodes: int) -> TokenTree:
        levels: Levels
        if self._heads_per_depth:
            levels = HydraLevels(self.engine, self.max_depth, proposal.states, anchor)
        else:
            length = self._lengths[proposal.row]
            levels = EagleLevels(self.engine, proposal.row, length, proposal.states)
        growth = TreeExpansion(anchor, num_nodes)
        growth.add(proposal.tokens, proposal.log_probs)
        for _ in range(1, self.max_depth):
            frontier = growth.frontier(self.beam_width, self.min_level_probability)
            if not frontier.tokens.size:
                break
            growth.add(*_children(levels.expand(frontier)))
        return growth.tree()

    def _read(self, row: int, following: int) -> Step:
        """Run a row's waiting context; ``following`` is the token after it."""
        tokens, features = map(np.concatenate, zip(*self._pending[row], strict=True))
        self._pending[row], self._num_pending[row] = [], 0
        count, start = tokens.size, self._lengths[row]
        if self._has_cache:
            self.engine.kv.reserve(start + count, row + 1)
        axes = pass_axes(A=count, Q=1, N=0, M=1)
        if self._heads_per_depth:
            axes |= depth_axes(self.max_depth, 0, 1)
        step = self.engine.step(row=row, **axes)
        inputs = step.inputs
        inputs["features"][0] = features
        inputs["query_indices"][0, 0] = count - 1
        if self._heads_per_depth:
            inputs["path_ids_0"][0, 0, 0] = following
        else:
            inputs["context_token_ids"][0, :-1] = tokens[1:]
            inputs["context_token_ids"][0, -1] = following
        if self._has_cache:
            inputs["context_position_ids"][0] = np.arange(start, start + count)
            inputs["write_index"][0] = start
            mask = inputs["attn_mask"][0, 0, 0]
            mask[: start + count] = True
            mask[start + count :] = False
            self._lengths[row] += count
        step.run()
        return step


def _children(step: Step) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return step.outputs["child_tokens"][0], step.outputs["child_logprobs"][0]
