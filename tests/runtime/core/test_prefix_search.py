"""CTC search, and the paper's search, against brute force over every frame path of tiny lattices."""

import copy
import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.baselines import paper_search, uncollapsed_search
from runtime.core.lattice import Lattice, Transition
from runtime.core.prefix_search import NEGLIGIBLE, prefix_search
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from tests.lattice_oracles import (
    ROOT,
    Prefix,
    brute_force,
    lattices,
    make_lattice,
    unmerged_lattices,
    walk_unmerged,
)

# Both sides start from the same float32 log-probabilities and add in float64; a transition's state is
# worked out in float32.
PSI_RTOL = 1e-6
MOVED_RTOL = 1e-5
# Times RAW_PER_NODE, more raw paths than the largest lattice of ``lattices`` has: 4 + 16 + 64 + 256.
ALL_NODES = 100

Search = Callable[..., TokenTree]


def check_best(
    tree: TokenTree, expected: dict[Prefix, float], num_nodes: int, rtol: float = PSI_RTOL
) -> None:
    """The tree holds the most probable prefixes of all, each once, in descending order."""
    paths = [tuple(tree.path(node)) for node in range(1, len(tree))]
    psi = np.exp(tree.log_probs[1:])
    # Fewer only when probability runs out, or nearly so: a prefix may lack its negligible frames.
    lost = NEGLIGIBLE * max(map(len, expected), default=0)
    assert min(num_nodes, sum(total > lost for total in expected.values())) <= len(paths)
    assert len(paths) <= min(num_nodes, len(expected))
    assert len(set(paths)) == len(paths)  # equal collapses are one node
    np.testing.assert_allclose(psi, [expected[path] for path in paths], rtol=rtol, atol=lost)
    best = sorted(expected.values(), reverse=True)[: len(paths)]
    np.testing.assert_allclose(psi, best, rtol=rtol, atol=lost)


@settings(max_examples=120)
@given(lattice=lattices(), num_nodes=st.integers(1, 40))
def test_prefix_search_equals_brute_force(lattice: Lattice, num_nodes: int) -> None:
    tree = prefix_search(lattice, root_token=ROOT, num_nodes=num_nodes)
    check_best(tree, brute_force(lattice), num_nodes)


@settings(max_examples=200)
@given(lattice=unmerged_lattices(), num_nodes=st.integers(1, 40))
def test_search_with_a_transition_equals_brute_force(lattice: Lattice, num_nodes: int) -> None:
    tree = prefix_search(lattice, root_token=ROOT, num_nodes=num_nodes)
    check_best(tree, walk_unmerged(lattice), num_nodes, MOVED_RTOL)


@pytest.mark.parametrize("kind", [lattices, unmerged_lattices])
def test_uncollapsed_search_takes_frame_t_as_token_t(kind: Callable[[], st.SearchStrategy[Lattice]]) -> None:
    """A path is a draft, whatever its blanks would have been worth and whether its labels repeat."""

    @settings(max_examples=60)
    @given(lattice=kind(), num_nodes=st.integers(1, 40))
    def check(lattice: Lattice, num_nodes: int) -> None:
        tree = uncollapsed_search(lattice, root_token=ROOT, num_nodes=num_nodes)
        check_best(tree, walk_unmerged(lattice, with_blanks=False), num_nodes, MOVED_RTOL)

    check()


def test_a_transition_by_hand() -> None:
    """After the root, label 5 is 8 times as likely as it was; after 5, label 6 is; after 6 nothing moves.

    The mass outside the labels, 0.2, is normalised with them.
    """
    eight = math.log(8)
    lattice = Lattice(
        frame_tokens=np.array([[6, 5], [5, 6]]),
        frame_logprobs=np.log(np.array([[0.4, 0.2], [0.4, 0.2]], np.float32)),
        blank_logprobs=np.log(np.array([0.2, 0.2], np.float32)),
        transition=Transition(
            frames=np.zeros((2, 0), np.float32),
            root=np.array([eight, 0], np.float32),
            previous=np.array([[[0, 0], [0, eight]], [[0, eight], [0, 0]]], np.float32),
            following=np.array([[[0, 1], [1, 0], [0, 0]], [[1, 0], [0, 1], [0, 0]]], np.float32),
        ),
        merges_repeats=False,
    )
    tree = prefix_search(lattice, root_token=ROOT, num_nodes=6)
    found = {tuple(tree.path(node)): math.exp(tree.log_probs[node]) for node in range(1, len(tree))}
    first, second = 0.2 * 8 / 2.4, 0.4 * 8 / 3.8  # of 5 in either frame, after the root
    expected = {
        (5,): first + 0.2 / 2.4 * second,  # at once, or after a blank
        (5, 6): first * 0.2 * 8 / 2.4,
        (6,): 0.4 / 2.4 + 0.2 / 2.4 * 0.2 / 3.8,
        (5, 5): first * 0.4 / 2.4,
        (6, 5): 0.4 / 2.4 * 0.4,
        (6, 6): 0.4 / 2.4 * 0.2,
    }
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=MOVED_RTOL)


@pytest.mark.parametrize("moved", [100.0, -100.0, 1000.0])
def test_a_transition_that_moves_far_overflows_nowhere(moved: float) -> None:
    lattice = dataclasses.replace(
        make_lattice([[5, 6]], [[0.5, 0.3]], [0.1]),
        transition=Transition(
            np.zeros((1, 0), np.float32),
            np.array([moved], np.float32),
            np.zeros((1, 2, 1), np.float32),
            np.array([[[1], [0], [0]]], np.float32),
        ),
        merges_repeats=False,
    )
    with np.errstate(divide="ignore"):
        tree = prefix_search(lattice, root_token=ROOT, num_nodes=2)
    psi = dict(zip(tree.tokens[1:].tolist(), np.exp(tree.log_probs[1:]), strict=True))
    assert psi.get(5, 0.0) == pytest.approx(1 if moved > 0 else 0, abs=1e-30)
    assert psi.get(6, 0.0) == pytest.approx(0 if moved > 0 else 0.3 / 0.5, abs=1e-6)


@pytest.mark.parametrize("search", [prefix_search, uncollapsed_search, paper_search])
@settings(max_examples=50)
@given(lattice=lattices(), num_nodes=st.integers(0, 20))
def test_a_valid_tree(search: Search, lattice: Lattice, num_nodes: int) -> None:
    tree = search(lattice, root_token=ROOT, num_nodes=num_nodes)
    assert tree.tokens[0] == ROOT
    assert tree.parents[0] == ROOT_PARENT
    assert tree.depths[0] == 0
    assert tree.log_probs[0] == 0.0
    assert len(tree) <= num_nodes + 1
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        assert 0 <= parent < node
        assert tree.depths[node] == tree.depths[parent] + 1 == len(tree.path(node))
        assert tree.log_probs[node] <= tree.log_probs[parent] + PSI_RTOL
    assert np.all(np.diff(tree.log_probs) <= PSI_RTOL)
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int64] * 3
    assert tree.log_probs.dtype == np.float64


@settings(max_examples=30)
@given(lattice=lattices(), num_nodes=st.integers(1, 10), more=st.integers(1, 10))
def test_the_first_n_nodes_are_the_best_n(lattice: Lattice, num_nodes: int, more: int) -> None:
    small = prefix_search(lattice, root_token=ROOT, num_nodes=num_nodes)
    large = prefix_search(lattice, root_token=ROOT, num_nodes=num_nodes + more)
    np.testing.assert_array_equal(large.log_probs[: len(small)], small.log_probs)


def test_prefix_search_by_hand() -> None:
    # Two frames that both hold label 5 at 0.6 and a blank at 0.4: three of four paths begin with 5.
    lattice = make_lattice([[5], [5]], [[0.6], [0.6]], [0.4, 0.4])
    tree = prefix_search(lattice, root_token=ROOT, num_nodes=8)
    assert tree.tokens.tolist() == [ROOT, 5]
    np.testing.assert_allclose(np.exp(tree.log_probs), [1.0, 1 - 0.4**2], rtol=PSI_RTOL)


def test_a_repeated_label_needs_a_blank_between() -> None:
    with_blank = make_lattice([[5], [5], [5]], [[0.6], [0.6], [0.6]], [0.4, 0.4, 0.4])
    tree = prefix_search(with_blank, root_token=ROOT, num_nodes=8)
    assert tree.path(2) == [5, 5]
    assert math.exp(tree.log_probs[2]) == pytest.approx(0.6 * 0.4 * 0.6, rel=PSI_RTOL)

    without = make_lattice([[5], [5], [5]], [[1.0], [1.0], [1.0]], [0.0, 0.0, 0.0])
    assert len(prefix_search(without, root_token=ROOT, num_nodes=8)) == 2


def test_the_first_label_may_repeat_the_root() -> None:
    tree = prefix_search(make_lattice([[5]], [[0.9]], [0.1]), root_token=5, num_nodes=4)
    assert tree.tokens.tolist() == [5, 5]


def test_a_lattice_of_blanks_gives_a_lone_root() -> None:
    tree = prefix_search(make_lattice([[5], [6]], [[0.0], [0.0]], [1.0, 1.0]), root_token=ROOT, num_nodes=4)
    assert tree.tokens.tolist() == [ROOT]


@pytest.mark.parametrize("search", [prefix_search, uncollapsed_search, paper_search])
def test_the_lattice_is_not_edited(search: Search) -> None:
    lattice = make_lattice([[6, 5], [5, 8]], [[0.5, 0.3], [0.6, 0.2]], [0.1, 0.1])
    before = copy.deepcopy(lattice)
    search(lattice, root_token=ROOT, num_nodes=5)
    np.testing.assert_array_equal(lattice.frame_tokens, before.frame_tokens)
    np.testing.assert_array_equal(lattice.frame_logprobs, before.frame_logprobs)
    np.testing.assert_array_equal(lattice.blank_logprobs, before.blank_logprobs)


@settings(max_examples=60)
@given(lattice=lattices(), num_nodes=st.integers(1, 20))
def test_paper_search_returns_collapses_of_frame_paths(lattice: Lattice, num_nodes: int) -> None:
    expected = brute_force(lattice)
    tree = paper_search(lattice, root_token=ROOT, num_nodes=num_nodes)
    paths = [tuple(tree.path(node)) for node in range(1, len(tree))]
    assert len(paths) <= num_nodes
    assert len(set(paths)) == len(paths)
    assert set(paths) <= set(expected)
    # It adds up some of a draft's raw paths, so it can only underestimate.
    for path, log_prob in zip(paths, tree.log_probs[1:], strict=True):
        assert math.exp(log_prob) <= expected[path] * (1 + PSI_RTOL)
    # The prefix search is at least as good at equal nodes.
    best = prefix_search(lattice, root_token=ROOT, num_nodes=len(paths))
    assert np.exp(best.log_probs[1:]).sum() >= sum(expected[path] for path in paths) * (1 - PSI_RTOL)


@settings(max_examples=40)
@given(lattice=lattices())
def test_paper_search_of_all_raw_paths_is_the_prefix_search(lattice: Lattice) -> None:
    paper = paper_search(lattice, root_token=ROOT, num_nodes=ALL_NODES)
    exact = prefix_search(lattice, root_token=ROOT, num_nodes=ALL_NODES)
    np.testing.assert_allclose(np.exp(paper.log_probs), np.exp(exact.log_probs), rtol=PSI_RTOL)


def test_paper_search_by_hand() -> None:
    # As many raw nodes as there are raw paths, so every path of label 5 counts.
    lattice = make_lattice([[5], [5]], [[0.6], [0.6]], [0.4, 0.4])
    tree = paper_search(lattice, root_token=ROOT, num_nodes=2)
    assert tree.tokens.tolist() == [ROOT, 5]
    np.testing.assert_allclose(np.exp(tree.log_probs), [1.0, 1 - 0.4**2], rtol=PSI_RTOL)
