"""The token tree and its attention masks against slow references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.trees.token_tree import ROOT_PARENT, TokenTree, fill_causal_mask, fill_tree_mask

NAMED_PARENTS = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "star": [-1, 0, 0, 0, 0],
    "mixed": [-1, 0, 0, 1, 1, 2, 5, 3],
}


@st.composite
def random_parents(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 14))
    return [ROOT_PARENT, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


def make_tree(parents: list[int]) -> TokenTree:
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return TokenTree(
        np.arange(100, 100 + len(parents), dtype=np.int64),
        np.array(parents, np.int64),
        np.array(depths, np.int64),
        np.zeros(len(parents)),
    )


def slow_tree_mask(parents: list[int], prefix_length: int, capacity: int) -> NDArray[np.bool_]:
    """Column by column: may row i see column s?"""

    def is_ancestor(node: int, of: int) -> bool:
        return of == node or (of > 0 and is_ancestor(node, parents[of]))

    return np.array(
        [
            [
                s < prefix_length or (s - prefix_length < len(parents) and is_ancestor(s - prefix_length, i))
                for s in range(capacity)
            ]
            for i in range(len(parents))
        ]
    )


def check_tree_mask(parents: list[int], prefix_length: int, spare: int) -> None:
    capacity = prefix_length + len(parents) + spare
    expected = slow_tree_mask(parents, prefix_length, capacity)
    for garbage in (False, True):  # whatever the buffer held before
        for first in (0, len(parents) // 2, len(parents) - 1):
            mask = np.full((len(parents) - first, capacity), garbage)
            fill_tree_mask(mask, np.array(parents, np.int64), prefix_length, first)
            np.testing.assert_array_equal(mask, expected[first:])


def test_tree_mask_docstring_example() -> None:
    mask = np.zeros((4, 5), np.bool_)
    fill_tree_mask(mask, np.array([-1, 0, 0, 1], np.int64), 1)
    assert ["".join("01"[int(x)] for x in row) for row in mask] == ["11000", "11100", "11010", "11101"]


@pytest.mark.parametrize("parents", NAMED_PARENTS.values(), ids=NAMED_PARENTS)
@pytest.mark.parametrize(("prefix_length", "spare"), [(0, 0), (1, 0), (5, 3)])
def test_tree_mask_of_named_trees(parents: list[int], prefix_length: int, spare: int) -> None:
    check_tree_mask(parents, prefix_length, spare)


@settings(max_examples=60, deadline=None)
@given(parents=random_parents(), prefix_length=st.integers(0, 6), spare=st.integers(0, 4))
def test_tree_mask_of_random_trees(parents: list[int], prefix_length: int, spare: int) -> None:
    check_tree_mask(parents, prefix_length, spare)


@settings(max_examples=40, deadline=None)
@given(parents=random_parents(), first=st.integers(0, 13), cut=st.integers(0, 13))
def test_tree_mask_of_the_last_nodes_of_a_forest(parents: list[int], first: int, cut: int) -> None:
    """Every tree that hangs on one of the first nodes, as the draft rows of a sequential head."""
    forest = np.array([max(parent - cut, ROOT_PARENT) for parent in parents[cut:]], np.int64)
    first = min(first, forest.size)
    whole, part = np.zeros((forest.size, 20), np.bool_), np.ones((forest.size - first, 20), np.bool_)
    fill_tree_mask(whole, forest, 4)
    fill_tree_mask(part, forest, 4, first)
    np.testing.assert_array_equal(part, whole[first:])


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 8), prefix_length=st.integers(0, 6), spare=st.integers(0, 4))
def test_causal_mask(count: int, prefix_length: int, spare: int) -> None:
    capacity = prefix_length + count + spare
    for garbage in (False, True):
        mask = np.full((count, capacity), garbage)
        fill_causal_mask(mask, prefix_length)
        np.testing.assert_array_equal(mask, np.tri(count, capacity, prefix_length, dtype=np.bool_))


def test_a_chain_is_a_causal_chunk() -> None:
    tree_mask, causal_mask = np.zeros((5, 9), np.bool_), np.zeros((5, 9), np.bool_)
    fill_tree_mask(tree_mask, np.array(NAMED_PARENTS["chain"], np.int64), 3)
    fill_causal_mask(causal_mask, 3)
    np.testing.assert_array_equal(tree_mask, causal_mask)


def test_path_spells_the_tokens_below_the_anchor() -> None:
    tree = make_tree(NAMED_PARENTS["mixed"])
    assert tree.path(0) == []
    assert tree.path(1) == [101]
    assert tree.path(7) == [101, 103, 107]
    assert tree.path(6) == [102, 105, 106]


@settings(max_examples=50, deadline=None)
@given(parents=random_parents())
def test_path_extends_the_parents_path(parents: list[int]) -> None:
    tree = make_tree(parents)
    assert len(tree) == len(parents)
    for node in range(1, len(tree)):
        assert tree.path(node) == [*tree.path(parents[node]), int(tree.tokens[node])]
        assert len(tree.path(node)) == tree.depths[node]


def test_root_is_a_tree_without_drafts() -> None:
    tree = TokenTree.root(42)
    assert len(tree) == 1
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([42], [ROOT_PARENT], [0])
    assert tree.log_probs.tolist() == [0.0]
    assert (tree.tokens.dtype, tree.parents.dtype, tree.depths.dtype) == (np.int64, np.int64, np.int64)
