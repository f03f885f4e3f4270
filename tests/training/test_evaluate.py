"""How many of the following tokens a draft tree spells."""

import numpy as np
import pytest

from runtime.tree import ROOT_PARENT, TokenTree
from training.evaluate import accepted_length

ANCHOR = 1


def make_tree(*nodes: tuple[int, int]) -> TokenTree:
    """Nodes after the anchor, each (parent, token)."""
    parents = np.array([ROOT_PARENT, *(parent for parent, _ in nodes)], np.int64)
    tokens = np.array([ANCHOR, *(token for _, token in nodes)], np.int64)
    depths = np.zeros(parents.size, np.int64)
    for node in range(1, parents.size):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(tokens, parents, depths, np.zeros(parents.size))


CHAIN = make_tree((0, 5), (1, 6), (2, 7))
STAR = make_tree((0, 5), (0, 6), (0, 7))
# 5 6 | 5 8 9 | 6 5 6; the words of one branch appear in others.
BRANCHES = make_tree((0, 5), (0, 6), (1, 6), (1, 8), (2, 5), (4, 9), (5, 6))


@pytest.mark.parametrize(
    ("tree", "following", "expected"),
    [
        (TokenTree.root(ANCHOR), [5, 6], 0),
        (CHAIN, [], 0),
        (CHAIN, [4], 0),
        (CHAIN, [ANCHOR, 5], 0),
        (CHAIN, [6, 7], 0),
        (CHAIN, [5], 1),
        (CHAIN, [5, 7], 1),
        (CHAIN, [5, 6, 7], 3),
        (CHAIN, [5, 6, 7, 8], 3),
        (STAR, [6, 7], 1),
        (STAR, [8], 0),
        (BRANCHES, [5, 6, 9], 2),
        (BRANCHES, [5, 8, 9], 3),
        (BRANCHES, [6, 8], 1),
        (BRANCHES, [6, 5, 6], 3),
        (BRANCHES, [6, 5, 8], 2),
    ],
)
def test_accepted_length(tree: TokenTree, following: list[int], expected: int) -> None:
    assert accepted_length(tree, following) == expected
