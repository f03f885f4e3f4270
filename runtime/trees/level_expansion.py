"""Growing a token tree level by level, as a sequential draft head reports children.

A node's score is the probability of its whole path, the product of the children's probabilities on
the way; no child scores above its parent, so the best nodes found so far are always a tree. Levels
are expanded as in EAGLE-2 (Li et al., arXiv 2406.16858): the best nodes of the newest level, at
most ``width`` of them. A node that cannot have a child among the best ``num_nodes`` is not expanded,
so with enough width the result is exactly the best tree the head knows. A level costs a pass of the
head, whatever it holds: growth may end where a draft is too unlikely to be accepted that far.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.trees.token_tree import ROOT_PARENT, TokenTree


@dataclass(frozen=True)
class Frontier:
    """F nodes to expand, best first.

    rows:   [F] int64, the row of the pass before that each node is a child of
    tokens: [F] int64
    """

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]


class TreeExpansion:
    """The best ``num_nodes`` candidates of one draft. Call ``add`` and ``frontier`` in turns."""

    def __init__(self, anchor: int, num_nodes: int):
        self._anchor = anchor
        # Best first; a candidate that falls out can never come back, nor can anything below it.
        self._scores = np.empty(num_nodes)
        # Columns: token, parent's serial number, own serial number, depth, row of the pass.
        self._nodes = np.empty((num_nodes, 5), np.int64)
        self._count = 0
        self._next_serial = 1
        self._depth = 0
        # The rows of the running pass: serial numbers (0 is the anchor's) and scores.
        self._row_serials = np.zeros(1, np.int64)
        self._row_scores = np.zeros(1)

    def add(self, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> None:
        """Take the children [F, K], best first, of the last frontier's nodes: first of the anchor."""
        self._depth += 1
        self._count, self._next_serial = _insert(
            self._scores,
            self._nodes,
            self._count,
            self._next_serial,
            self._depth,
            self._row_serials,
            self._row_scores,
            tokens,
            log_probs,
        )

    def frontier(self, width: int, min_level_probability: float = 0.0) -> Frontier:
        """Nodes of the newest level that are worth a pass; none once the tree is final.

        min_level_probability: probability of reaching one of them below which the level is left out
        """
        rows, tokens, self._row_serials, self._row_scores = _newest(
            self._scores, self._nodes, self._count, self._depth, width, min_level_probability
        )
        return Frontier(rows, tokens)

    def tree(self) -> TokenTree:
        """The anchor and the best candidates, most probable first."""
        nodes = self._nodes[: self._count]
        place = np.zeros(self._next_serial, np.int64)
        place[nodes[:, 2]] = np.arange(1, self._count + 1)
        return TokenTree(
            np.concatenate(([self._anchor], nodes[:, 0])),
            np.concatenate(([ROOT_PARENT], place[nodes[:, 1]])),
            np.concatenate(([0], nodes[:, 3])),
            np.concatenate(([0.0], self._scores[: self._count])),
        )


@njit(cache=True)
def _insert(
    scores: NDArray[np.float64],
    nodes: NDArray[np.int64],
    count: int,
    next_serial: int,
    depth: int,
    row_serials: NDArray[np.int64],
    row_scores: NDArray[np.float64],
    tokens: NDArray[np.int64],
    log_probs: NDArray[np.float32],
) -> tuple[int, int]:
    """Sort the children into the candidates; returns the new count and serial number."""
    room = scores.size
    for row in range(row_serials.size if room else 0):
        for rank in range(tokens.shape[1]):
            # Rounding may leave a certain child a hair above 0, hence above its parent.
            score = row_scores[row] + min(np.float64(log_probs[row, rank]), 0.0)
            if score == -np.inf or (count == room and score <= scores[room - 1]):
                break
            position = min(count, room - 1)
            while position > 0 and scores[position - 1] < score:
                scores[position] = scores[position - 1]
                nodes[position] = nodes[position - 1]
                position -= 1
            scores[position] = score
            nodes[position, 0] = tokens[row, rank]
            nodes[position, 1] = row_serials[row]
            nodes[position, 2] = next_serial
            nodes[position, 3] = depth
            nodes[position, 4] = row
            next_serial += 1
            count = min(count + 1, room)
    return count, next_serial


@njit(cache=True)
def _newest(
    scores: NDArray[np.float64],
    nodes: NDArray[np.int64],
    count: int,
    depth: int,
    width: int,
    min_level_probability: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Rows, tokens, serial numbers and scores of the best candidates of a depth."""
    size = 0
    reach = 0.0
    chosen = np.empty(width, np.int64)
    # Whatever is below the node in the last place ranks after it.
    for place in range(min(count, scores.size - 1)):
        if nodes[place, 3] == depth and size < width:
            chosen[size] = place
            size += 1
            reach += np.exp(scores[place])
    chosen = chosen[: size if reach >= min_level_probability else 0]
    return nodes[chosen, 4], nodes[chosen, 0], nodes[chosen, 2], scores[chosen]
