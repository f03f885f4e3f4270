"""What the loop asks of a draft head, and what draft trees are made with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from runtime.trees.token_tree import ROOT_PARENT, TokenTree

TREE, CHAIN = "tree", "chain"
SHAPES = (TREE, CHAIN)
# A chain is the best path of a search for this many times as many nodes; with more, chains hardly change.
CHAIN_SEARCH = 4


@dataclass(frozen=True)
class DraftOptions:
    """How many drafts a step verifies, and of which shape.

    num_nodes: draft nodes of a tree, its root not counted, or drafts of a chain
    shape: ``tree`` or ``chain``
    top_k: labels of a frame, or children of a node, that a head returns
    beam_width, min_level_probability: as in ``runtime.trees.level_expansion``
    """

    num_nodes: int = 16
    shape: str = TREE
    top_k: int = 16
    beam_width: int = 4
    min_level_probability: float = 0.2


@dataclass(frozen=True)
class Context:
    """New context of a sequence: tokens [A] int64 and their features [A, F*H]."""

    tokens: Tensor
    features: Tensor


class Drafts(Protocol):
    """The drafts of a batch of sequences, each with its own context."""

    def propose(
        self, contexts: Sequence[Context], roots: Sequence[int | None], num_nodes: int
    ) -> list[TokenTree]:
        """Read new context and draft after each root; the tree of a sequence that has none is empty.

        contexts: what has come since the last call; A is at least 1 unless the sequence has no root
        num_nodes: drafts of a tree at most; 0 for none
        """
        ...


def shallow(tree: TokenTree, depth: int) -> TokenTree:
    """The nodes of a tree up to a depth."""
    return tree.subset(np.flatnonzero(tree.depths <= depth))


def best_chain(tree: TokenTree, length: int) -> TokenTree:
    """The path of at most ``length`` drafts on which most are accepted, if the probabilities are right.

    A path's expected number of accepted drafts is the sum of its nodes' prefix probabilities.
    """
    best = np.exp(tree.log_probs)
    best[tree.depths > length] = 0.0
    follower = np.full(len(tree), -1)
    gain = np.zeros(len(tree))
    # Children come after their parents, so a node's own best path is known when its turn comes.
    for node in range(len(tree) - 1, 0, -1):
        best[node] += gain[node]
        parent = int(tree.parents[node])
        if best[node] > gain[parent]:
            gain[parent], follower[parent] = best[node], node
    path = [0]
    while follower[path[-1]] >= 0 and len(path) <= length:
        path.append(int(follower[path[-1]]))
    chain = np.arange(len(path))
    return TokenTree(tree.tokens[path], chain + ROOT_PARENT, chain, tree.log_probs[path])
