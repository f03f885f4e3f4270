"""Attention masks against slow references."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.core.token_tree import ROOT_PARENT
from runtime.engines.kv_cache import fill_causal_mask, fill_frame_mask, fill_tree_mask
from tests.fake_engines import FakeForwardPass, FakeTargetEngine

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


def slow_tree_mask(parents: list[int], prefix_length: int, capacity: int) -> NDArray[np.bool_]:
    """Column by column: may node i see position s?"""

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


@settings(max_examples=60)
@given(parents=random_parents(), prefix_length=st.integers(0, 6), spare=st.integers(0, 4))
def test_tree_mask_of_random_trees(parents: list[int], prefix_length: int, spare: int) -> None:
    check_tree_mask(parents, prefix_length, spare)


@settings(max_examples=40)
@given(parents=random_parents(), first=st.integers(0, 13), cut=st.integers(0, 13))
def test_tree_mask_of_the_last_nodes_of_a_forest(parents: list[int], first: int, cut: int) -> None:
    """Every tree that hangs on one of the first nodes, as the draft nodes of an autoregressive head."""
    forest = np.array([max(parent - cut, ROOT_PARENT) for parent in parents[cut:]], np.int64)
    first = min(first, forest.size)
    whole, part = np.zeros((forest.size, 20), np.bool_), np.ones((forest.size - first, 20), np.bool_)
    fill_tree_mask(whole, forest, 4)
    fill_tree_mask(part, forest, 4, first)
    np.testing.assert_array_equal(part, whole[first:])


@settings(max_examples=50)
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


@pytest.mark.parametrize("garbage", [False, True])
def test_frames_see_the_context_and_all_frames(garbage: bool) -> None:
    """Two positions of padding lie between the context and the frames."""
    mask = np.full((3, 10), garbage)
    fill_frame_mask(mask, 4, 6)
    assert mask.tolist() == [[True] * 4 + [False] * 2 + [True] * 3 + [False]] * 3


# The masks of a pass, which engines with a host's buffers share.


def prepare(num_seqs: int, size: int) -> FakeForwardPass:
    """A pass whose mask is full of garbage."""
    engine = FakeTargetEngine(max_num_seqs=num_seqs)
    forward = engine.forward_pass(B=num_seqs, N=size, M=size)
    forward.inputs["attn_mask"][...] = True
    return forward


@settings(max_examples=40)
@given(
    trees=st.lists(random_parents(), min_size=1, max_size=3), spare=st.integers(0, 3), seed=st.integers(0, 99)
)
def test_trees_of_several_sequences(trees: list[list[int]], spare: int, seed: int) -> None:
    """Every sequence has its own tree and length; padding sees its own position alone."""
    size = max(map(len, trees)) + spare
    forward = prepare(len(trees), size)
    lengths = np.random.default_rng(seed).integers(0, 20, len(trees)).tolist()
    forward.mask_tree([np.array(parents, np.int64) for parents in trees], lengths)
    for mask, parents, length in zip(forward.inputs["attn_mask"][:, 0], trees, lengths, strict=True):
        count = len(parents)
        np.testing.assert_array_equal(mask[:count], slow_tree_mask(parents, length, mask.shape[1]))
        own = np.eye(mask.shape[1], dtype=np.bool_)[length + count : length + size]
        np.testing.assert_array_equal(mask[count:], own)


@pytest.mark.parametrize("spare", [0, 2])
def test_the_last_nodes_of_a_tree(spare: int) -> None:
    parents = NAMED_PARENTS["mixed"]
    first, length = 3, 6
    forward = prepare(1, len(parents) - first + spare)
    forward.mask_tree([np.array(parents, np.int64)], [length], first)
    mask = forward.inputs["attn_mask"][0, 0]
    expected = slow_tree_mask(parents, length, mask.shape[1])[first:]
    np.testing.assert_array_equal(mask[: len(expected)], expected)
    own = np.eye(mask.shape[1], dtype=np.bool_)[length + len(parents) :][:spare]
    np.testing.assert_array_equal(mask[len(expected) :], own)


def test_prompt_chunks_of_several_sequences() -> None:
    forward = prepare(2, 3)
    forward.mask_causal([0, 5])
    masks = forward.inputs["attn_mask"][:, 0]
    for mask, start in zip(masks, (0, 5), strict=True):
        np.testing.assert_array_equal(mask, np.tri(3, mask.shape[1], start, dtype=np.bool_))
