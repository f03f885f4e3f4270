"""Expanding a tree level by level, against an exhaustive search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.level_expansion import TreeExpansion
from tests.fake_heads import Children
from tests.tree_oracles import (
    ROOT,
    RTOL,
    UNLIMITED,
    check_best,
    check_valid,
    exhaustive,
    expand,
    random_children,
)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 4),
    depth=st.integers(1, 4),
    num_nodes=st.integers(1, 60),
    sharpness=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_expansion_finds_the_best_nodes_of_all(
    seed: int, width: int, depth: int, num_nodes: int, sharpness: float
) -> None:
    children = random_children(seed, width, sharpness)
    tree, _ = expand(children, depth, num_nodes, UNLIMITED)
    check_best(tree, exhaustive(children, [ROOT], depth), num_nodes)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 40), beam_width=st.integers(1, 5))
def test_a_limited_width_still_gives_the_best_of_what_was_seen(
    seed: int, num_nodes: int, beam_width: int
) -> None:
    children = random_children(seed, 4)
    tree, expanded = expand(children, 4, num_nodes, beam_width)
    assert max(expanded, default=0) <= beam_width
    check_valid(tree)
    expected = exhaustive(children, [ROOT], 4)
    for node in range(1, len(tree)):
        assert tree.log_probs[node] == pytest.approx(expected[tuple(tree.path(node))], rel=RTOL)
    # Every expanded level offers its best nodes' children: the greedy path is never missed.
    exact, _ = expand(children, 4, num_nodes, UNLIMITED)
    assert tree.path(1) == exact.path(1)


def table(probs: list[float]) -> Children:
    """The same distribution after everything."""
    tokens = np.arange(10, 10 + len(probs))
    return lambda path: (tokens, np.log(np.array(probs)).astype(np.float32))


@pytest.mark.parametrize(
    ("probs", "num_nodes", "expanded"),
    [
        ([0.6, 0.3], 1, []),  # the best child is the tree
        ([0.6, 0.3], 2, [1]),  # a child of the first, 0.36, beats the second
        ([0.5, 0.45], 2, [1]),  # 0.25 does not, but who knows before the pass
        ([0.4, 0.35, 0.2], 3, [2]),  # of four children of 0.16 and less none comes in: it ends there
        ([1.0, 0.0], 4, [1, 1, 1]),  # what has no probability is never a node
    ],
)
def test_no_pass_without_a_chance(probs: list[float], num_nodes: int, expanded: list[int]) -> None:
    with np.errstate(divide="ignore"):
        tree, found = expand(table(probs), 4, num_nodes, UNLIMITED)
    assert found == expanded
    assert len(tree) <= num_nodes + 1


@pytest.mark.parametrize(
    ("min_level_probability", "levels"),
    [(0.0, 3), (0.7, 3), (0.75, 2), (0.85, 1), (0.95, 0)],
)
def test_no_pass_for_a_level_that_is_hardly_reached(min_level_probability: float, levels: int) -> None:
    """Of two children, 0.6 and 0.3, all are on the frontier: levels are reached with 0.9, 0.81, 0.729."""
    expansion = TreeExpansion(ROOT, 40)
    tokens, log_probs = np.array([[5, 6]]), np.log(np.array([[0.6, 0.3]], np.float32))
    expansion.add(tokens, log_probs)
    found = 0
    while (count := expansion.frontier(UNLIMITED, min_level_probability).tokens.size) and found < 3:
        expansion.add(tokens.repeat(count, axis=0), log_probs.repeat(count, axis=0))
        found += 1
    assert found == levels


def test_a_certain_child_comes_after_its_parent() -> None:
    """Even where rounding puts its log-probability above zero."""
    expansion = TreeExpansion(ROOT, 4)
    for token in (5, 6, 5):
        expansion.add(np.array([[token]]), np.array([[1e-6]], np.float32))
        expansion.frontier(1)
    tree = expansion.tree()
    assert tree.path(3) == [5, 6, 5]
    assert tree.log_probs.tolist() == [0.0] * 4
    check_valid(tree)


def test_an_empty_tree_is_a_lone_root() -> None:
    expansion = TreeExpansion(ROOT, 0)
    expansion.add(np.array([[5]]), np.zeros((1, 1), np.float32))
    assert expansion.frontier(4).tokens.size == 0
    assert len(expansion.tree()) == 1
