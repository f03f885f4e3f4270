"""Acceptance: the longest path of the tree that the backbone itself would have written."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.decoding.target_model import VerifyOutput
from runtime.trees.token_tree import TokenTree

_LONE_PATH = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Acceptance:
    """The verdict on one tree.

    path:  [A] int64 node indices from the anchor (always 0) to the last accepted node
    bonus: the backbone's own token after that node, which becomes the next anchor
    log_probs: of the A new tokens, the path's after the anchor and the bonus; empty where not asked for
    """

    path: NDArray[np.int64]
    bonus: int
    log_probs: tuple[float, ...] = ()


class Acceptor(Protocol):
    """How one text's tokens are chosen, tree after tree."""

    needs_logits: bool

    def accept(self, tree: TokenTree, verdict: VerifyOutput) -> Acceptance: ...


class GreedyAcceptor:
    """Takes the backbone's own choices."""

    needs_logits = False

    def accept(self, tree: TokenTree, verdict: VerifyOutput) -> Acceptance:
        return greedy_accept(tree, verdict.next_tokens)


def greedy_accept(tree: TokenTree, next_tokens: NDArray[np.int64]) -> Acceptance:
    """Walk down from the anchor while a child equals the backbone's choice.

    next_tokens: [N+1] int64, the backbone's argmax after each node.
    Exact: the accepted tokens and the bonus are those of plain greedy decoding.
    """
    if len(tree) == 1:
        return Acceptance(_LONE_PATH, int(next_tokens[0]))
    path = _walk(tree.tokens, tree.parents, next_tokens)
    return Acceptance(path, int(next_tokens[path[-1]]))


@njit(cache=True)
def _walk(
    tokens: NDArray[np.int64], parents: NDArray[np.int64], next_tokens: NDArray[np.int64]
) -> NDArray[np.int64]:
    path = np.empty(tokens.size, np.int64)
    path[0] = 0
    length = 1
    for node in range(1, tokens.size):  # a child always comes after its parent
        current = path[length - 1]
        if parents[node] == current and tokens[node] == next_tokens[current]:
            path[length] = node
            length += 1
    return path[:length]
