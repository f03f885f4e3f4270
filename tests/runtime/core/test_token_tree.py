"""The token tree: paths, cuts and the lone root."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.token_tree import ROOT_PARENT, TokenTree
from tests import fakes


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 14))
    return [ROOT_PARENT, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def make_tree(parents: list[int]) -> TokenTree:
    """Node i has token 100 + i."""
    return fakes.make_tree(100, [(parent, 101 + index) for index, parent in enumerate(parents[1:])])


def test_path_spells_the_tokens_below_the_root() -> None:
    tree = make_tree([-1, 0, 0, 1, 1, 2, 5, 3])
    assert tree.path(0) == []
    assert tree.path(1) == [101]
    assert tree.path(7) == [101, 103, 107]
    assert tree.path(6) == [102, 105, 106]


@settings(max_examples=50)
@given(parents=random_parents())
def test_path_extends_the_parents_path(parents: list[int]) -> None:
    tree = make_tree(parents)
    assert len(tree) == len(parents)
    for node in range(1, len(tree)):
        assert tree.path(node) == [*tree.path(parents[node]), int(tree.tokens[node])]
        assert len(tree.path(node)) == tree.depths[node]


def test_the_first_drafts_of_a_tree() -> None:
    tree = fakes.make_tree(7, [(0, 1), (0, 2), (1, 3)], np.log([0.5, 0.4, 0.3]).tolist())
    short = tree.first(2)
    assert len(short) == 3
    assert short.tokens.tolist() == [7, 1, 2]
    assert short.parents.tolist() == [ROOT_PARENT, 0, 0]
    assert short.depths.tolist() == [0, 1, 1]
    assert short.log_probs.tolist() == tree.log_probs[:3].tolist()
    assert len(tree.first(0)) == 1


def test_root_is_a_tree_without_drafts() -> None:
    tree = TokenTree.root(42)
    assert len(tree) == 1
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([42], [ROOT_PARENT], [0])
    assert tree.log_probs.tolist() == [0.0]
    assert (tree.tokens.dtype, tree.parents.dtype, tree.depths.dtype) == (np.int64, np.int64, np.int64)
