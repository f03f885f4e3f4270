"""The token tree that one verify pass checks.

Node 0 is the root: the last committed token, which the target model chose itself. Every other node is a draft
token. The path from the root to a node spells a continuation. A parent comes before its children.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT_PARENT = -1
# All lone roots share these: plain decoding makes one for every token.
_LONE_PARENT = np.array([ROOT_PARENT], np.int64)
_LONE_DEPTH = np.zeros(1, np.int64)
_LONE_LOG_PROB = np.zeros(1)


@dataclass(frozen=True)
class TokenTree:
    """One sequence's draft of N nodes.

    tokens:    [N+1] int64, ``tokens[0]`` is the root
    parents:   [N+1] int64, ``parents[0] == -1``, ``parents[i] < i``
    depths:    [N+1] int64, 0 for the root
    log_probs: [N+1] float64, log of the prefix probability: that the draft starts with the node's path
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    log_probs: NDArray[np.float64]

    def __len__(self) -> int:
        """Number of nodes with the root: the inputs of the verify pass."""
        return self.tokens.size

    @classmethod
    def root(cls, token: int) -> "TokenTree":
        """A tree without drafts: verifying it is one step of plain decoding."""
        return cls(np.array([token], np.int64), _LONE_PARENT, _LONE_DEPTH, _LONE_LOG_PROB)

    @classmethod
    def chain(cls, tokens: NDArray[np.int64]) -> "TokenTree":
        """The tokens [N+1] int64 one after the other, each with probability 1."""
        depths = np.arange(tokens.size)
        return cls(tokens, depths - 1, depths, np.zeros(tokens.size))

    def first(self, count: int) -> "TokenTree":
        """The tree of the first ``count`` drafts alone."""
        end = count + 1
        return TokenTree(self.tokens[:end], self.parents[:end], self.depths[:end], self.log_probs[:end])

    def subset(self, nodes: NDArray[np.int64]) -> "TokenTree":
        """The tree of these nodes [K], which ascend from the root and have their parents among them."""
        if nodes.size == len(self):
            return self
        parents = np.searchsorted(nodes, self.parents[nodes])
        parents[0] = ROOT_PARENT
        return TokenTree(self.tokens[nodes], parents, self.depths[nodes], self.log_probs[nodes])

    def walk(self, choose: Callable[[int], int]) -> tuple[NDArray[np.int64], int]:
        """Accept drafts: go down from the root while a child has the token that ``choose(node)`` returns.

        ``choose`` is called once for each node of the path, in order.
        Returns the path [A] int64 (node indices, 0 first) and the token chosen after its last node.
        """
        # Lists: reading single elements of an array takes longer than copying a tree of this size.
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        path = [0]
        while True:
            token = choose(path[-1])
            following = range(path[-1] + 1, len(tokens))
            child = next((n for n in following if parents[n] == path[-1] and tokens[n] == token), None)
            if child is None:
                return np.array(path, np.int64), token
            path.append(child)

    def path(self, node: int) -> list[int]:
        """Draft tokens from the root (excluded) to ``node``."""
        tokens: list[int] = []
        while node > 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]
