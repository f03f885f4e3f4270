"""The token tree that one verify pass checks.

Node 0 is the anchor: the last token the backbone chose itself. Every other node is a draft token;
the path from the anchor to a node spells a continuation. Nodes are ordered so that a parent comes
before its children.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

ROOT_PARENT = -1
# Shared by all lone anchors: plain decoding makes one a token.
_LONE_PARENT = np.array([ROOT_PARENT], np.int64)
_LONE_DEPTH = np.zeros(1, np.int64)
_LONE_LOG_PROB = np.zeros(1)


@dataclass(frozen=True)
class TokenTree:
    """One sequence's draft.

    tokens:    [N+1] int64, ``tokens[0]`` is the anchor
    parents:   [N+1] int64, ``parents[0] == -1``, ``parents[i] < i``
    depths:    [N+1] int64, 0 for the anchor
    log_probs: [N+1] float64, log-probability that the draft starts with the node's path
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    def __len__(self) -> int:
        """Number of nodes with the anchor: the rows of the verify pass."""
        return self.tokens.size

    @classmethod
    def root(cls, anchor: int) -> "TokenTree":
        """A tree without drafts: verifying it is one step of plain decoding."""
        return cls(np.array([anchor], np.int64), _LONE_PARENT, _LONE_DEPTH, _LONE_LOG_PROB)

    def first(self, count: int) -> "TokenTree":
        """The tree of the first ``count`` drafts alone."""
        end = count + 1
        return TokenTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.log_probs[:end])

    def path(self, node: int) -> list[int]:
        """Draft tokens from the anchor (excluded) to ``node``."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]


@njit(cache=True)
def fill_tree_mask(
    mask: NDArray[np.bool_], parents: NDArray[np.int64], prefix_length: int, first: int = 0
) -> None:
    """Write a tree's attention mask in place, for its nodes from ``first`` on.

    mask [N+1 - first, S]: the row of node i becomes True at the prefix's columns ``[0, prefix_length)``
    and, at ``prefix_length + j``, for i itself and every ancestor j of i.
    Example: parents (-1, 0, 0, 1), prefix_length 1 -> rows 1100 0, 1110 0, 1101 0, 1110 1.
    """
    for node in range(first, parents.size):
        row = mask[node - first]
        row[:prefix_length] = True
        row[prefix_length:] = False
        ancestor = node
        while ancestor >= 0:
            row[prefix_length + ancestor] = True
            ancestor = parents[ancestor]


@njit(cache=True)
def fill_padding_mask(mask: NDArray[np.bool_], first: int, prefix_length: int) -> None:
    """Write the mask of a tree's padding in place: row i of [N, S], from ``first`` on, sees itself alone."""
    for node in range(first, mask.shape[0]):
        mask[node] = False
        mask[node, prefix_length + node] = True


@njit(cache=True)
def fill_causal_mask(mask: NDArray[np.bool_], prefix_length: int) -> None:
    """Write a prompt chunk's mask in place: row i of [N, S] is True up to column prefix_length + i."""
    for row in range(mask.shape[0]):
        mask[row, : prefix_length + row + 1] = True
        mask[row, prefix_length + row + 1 :] = False
