"""Acceptance: the longest path of the tree that the target model itself would have written."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.trees.token_tree import TokenTree


@dataclass(frozen=True)
class Acceptance:
    """What a verified tree adds to its sequence.

    path: [A] int64 node indices from the root (always 0) to the last accepted node
    bonus: the target model's own token after that node, the root of the next tree
    log_probs: of the A new tokens (the path's after the root, and the bonus); empty where not asked for
    """

    path: NDArray[np.int64]
    bonus: int
    log_probs: tuple[float, ...] = ()


class Acceptor(Protocol):
    """How the tokens of one sequence are chosen, tree after tree."""

    needs_logits: bool

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        """next_tokens [M] int64 and logits [M, V]: the target model's, after every node.

        M is at least the tree's N + 1 nodes; the rest is padding.

        logits may be None where ``needs_logits`` is false.
        """
        ...


class GreedyAcceptor:
    """Takes the target model's most probable tokens.

    Exact: the accepted tokens and the bonus are those of plain greedy decoding.
    """

    needs_logits = False

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        return Acceptance(*tree.walk(next_tokens.item))
