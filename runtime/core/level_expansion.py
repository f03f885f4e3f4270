"""Expanding a token tree level by level, from the children that an autoregressive draft head reports.

A node's score is the probability of its whole path, so no child scores above its parent, and the best nodes
found so far are always a tree. Levels are expanded as in EAGLE-2 (Li et al., arXiv 2406.16858): the best
nodes of the newest level, at most ``beam_width`` of them. A node that cannot have a child among the best
``num_nodes`` is not expanded, so with a wide enough beam the result is exactly the best tree that the head
knows. A level costs one pass of the head, whatever it holds: expansion may end where a draft is too unlikely
to be accepted that far.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.token_tree import ROOT_PARENT, TokenTree

# Columns of ``TreeExpansion._nodes``. A node's id counts all nodes that were ever candidates; the root has id
# 0.
TOKEN, PARENT_ID, ID, DEPTH, PASS_INDEX = range(5)
NUM_COLUMNS = 5


@dataclass(frozen=True)
class Frontier:
    """F nodes to expand, best first."""

    parents: NDArray[
        np.int64
    ]  # [F], for each node the index of its parent among the nodes of the pass before
    tokens: NDArray[np.int64]  # [F]


class Children(NamedTuple):
    """The children of F nodes that may become drafts, best first."""

    tokens: NDArray[np.int64]  # [F, K]
    log_probs: NDArray[np.float32]  # [F, K]


class LevelPasses(Protocol):
    """The passes of one sequence's draft nodes. It keeps the states of the last pass, the root's at first."""

    def run_nodes(self, frontier: Frontier, parents: NDArray[np.int64], depth: int) -> Children:
        """Run EAGLE's pass: a node reads its parent's state and attends to the context and its ancestors.

        frontier: ``frontier.parents`` index the states of the last pass
        parents: [N] int64, of all draft nodes so far, of which the frontier's are the last F; -1 for the root
        depth: of the frontier's nodes
        """
        ...

    def run_paths(self, paths: NDArray[np.int64]) -> Children:
        """Run Hydra's pass for F nodes of one depth; paths [F, depth + 1] int64: the tokens from the root."""
        ...


class Levels(Protocol):
    """The levels of one tree, expanded from the top down."""

    def expand(self, frontier: Frontier) -> Children:
        """Run the pass of a level's nodes; ``frontier.parents`` index the nodes of the pass before it."""
        ...


class EagleLevels:
    """Levels of a head whose nodes each have a state of their own."""

    def __init__(self, passes: LevelPasses):
        self._passes = passes
        # The parent of each node so far, as an index among them.
        self._parents = np.empty(0, np.int64)
        self._depth, self._last_size = 0, 1

    def expand(self, frontier: Frontier) -> Children:
        self._depth += 1
        # The last nodes so far are the level above. The root is not among them, which gives its children -1.
        above = frontier.parents + (self._parents.size - self._last_size)
        self._parents = np.append(self._parents, above)
        self._last_size = frontier.tokens.size
        return self._passes.run_nodes(frontier, self._parents, self._depth)


class HydraLevels:
    """Levels of a head that reads the whole path to a node."""

    def __init__(self, passes: LevelPasses, root_token: int):
        self._passes = passes
        self._paths = np.array([[root_token]])

    def expand(self, frontier: Frontier) -> Children:
        self._paths = np.column_stack((self._paths[frontier.parents], frontier.tokens))
        return self._passes.run_paths(self._paths)


class TreeExpansion:
    """The best ``num_nodes`` candidates of one draft. Call ``add`` and ``frontier`` in turns."""

    def __init__(self, root_token: int, num_nodes: int):
        self._root_token = root_token
        # Best first. A candidate that drops out can never come back, nor can anything below it.
        self._scores = np.empty(num_nodes)
        self._nodes = np.empty((num_nodes, NUM_COLUMNS), np.int64)
        self._count = 0
        self._next_id = 1
        self._depth = 0
        # Ids and scores of the nodes in the running pass.
        self._pass_ids = np.zeros(1, np.int64)
        self._pass_scores = np.zeros(1)

    def add(self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Take the children [F, K], best first, of the last frontier's nodes; first those of the root."""
        self._depth += 1
        self._count, self._next_id = _insert(
            self._scores,
            self._nodes,
            self._count,
            self._next_id,
            self._depth,
            self._pass_ids,
            self._pass_scores,
            tokens,
            log_probs,
        )

    def frontier(self, beam_width: int, min_level_probability: float = 0.0) -> Frontier:
        """Nodes of the newest level that are worth a pass; none once the tree is final.

        min_level_probability: a level whose nodes have a smaller probability together is left out
        """
        parents, tokens, self._pass_ids, self._pass_scores = _newest(
            self._scores, self._nodes, self._count, self._depth, beam_width, min_level_probability
        )
        return Frontier(parents, tokens)

    def tree(self) -> TokenTree:
        """The root and the best candidates, most probable first."""
        nodes = self._nodes[: self._count]
        index = np.zeros(self._next_id, np.int64)
        index[nodes[:, ID]] = np.arange(1, self._count + 1)
        return TokenTree(
            np.concatenate(([self._root_token], nodes[:, TOKEN])),
            np.concatenate(([ROOT_PARENT], index[nodes[:, PARENT_ID]])),
            np.concatenate(([0], nodes[:, DEPTH])),
            np.concatenate(([0.0], self._scores[: self._count])),
        )


def expand_tree(
    levels: Levels,
    root_token: int,
    children: Children,
    *,
    num_nodes: int,
    max_depth: int,
    beam_width: int,
    min_level_probability: float = 0.0,
) -> TokenTree:
    """The best ``num_nodes`` drafts after a root.

    children: of the root
    max_depth: levels that the head can draft
    beam_width, min_level_probability: as in ``TreeExpansion.frontier``
    """
    expansion = TreeExpansion(root_token, num_nodes)
    expansion.add(*children)
    for _ in range(1, max_depth):
        frontier = expansion.frontier(beam_width, min_level_probability)
        if not frontier.tokens.size:
            break
        expansion.add(*levels.expand(frontier))
    return expansion.tree()


@njit(cache=True)
def _insert(
    scores: NDArray[np.float64],
    nodes: NDArray[np.int64],
    count: int,
    next_id: int,
    depth: int,
    pass_ids: NDArray[np.int64],
    pass_scores: NDArray[np.float64],
    tokens: NDArray[np.int64],
    log_probs: NDArray[np.float32],
) -> tuple[int, int]:
    """Sort the children into the candidates; returns the new count and the next id."""
    room = scores.size
    for parent in range(pass_ids.size if room else 0):
        for rank in range(tokens.shape[1]):
            # Rounding may leave a certain child a hair above 0, hence above its parent.
            score = pass_scores[parent] + min(np.float64(log_probs[parent, rank]), 0.0)
            if score == -np.inf or (count == room and score <= scores[room - 1]):
                break
            position = min(count, room - 1)
            while position > 0 and scores[position - 1] < score:
                scores[position] = scores[position - 1]
                nodes[position] = nodes[position - 1]
                position -= 1
            scores[position] = score
            nodes[position, TOKEN] = tokens[parent, rank]
            nodes[position, PARENT_ID] = pass_ids[parent]
            nodes[position, ID] = next_id
            nodes[position, DEPTH] = depth
            nodes[position, PASS_INDEX] = parent
            next_id += 1
            count = min(count + 1, room)
    return count, next_id


@njit(cache=True)
def _newest(
    scores: NDArray[np.float64],
    nodes: NDArray[np.int64],
    count: int,
    depth: int,
    beam_width: int,
    min_level_probability: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Parents' indices, tokens, ids and scores of the best candidates of a depth."""
    size = 0
    probability = 0.0
    chosen = np.empty(beam_width, np.int64)
    # Whatever is below the node in the last place ranks after it, so that node is never expanded.
    for position in range(min(count, scores.size - 1)):
        if nodes[position, DEPTH] == depth and size < beam_width:
            chosen[size] = position
            size += 1
            probability += np.exp(scores[position])
    chosen = chosen[: size if probability >= min_level_probability else 0]
    return nodes[chosen, PASS_INDEX], nodes[chosen, TOKEN], nodes[chosen, ID], scores[chosen]
