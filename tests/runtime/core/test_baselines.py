"""Medusa's published tree, node for node, and what is left of it for smaller heads."""

import copy

import numpy as np
import pytest

from runtime.core.baselines import medusa_search
from runtime.core.lattice import Lattice
from runtime.core.token_tree import ROOT_PARENT

ROOT = 7
# medusa/model/medusa_choices.py of github.com/FasterDecoding/Medusa: the rank of each head's label.
MC_SIM_7B_63 = [
    *([0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0]),
    *([0, 5], [0, 0, 1], [5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0]),
    *([0, 9], [8], [9], [1, 0, 0], [0, 2, 0], [1, 2], [0, 0, 3], [4, 0], [2, 1], [0, 0, 4], [0, 0, 5]),
    *([0, 0, 0, 0], [0, 1, 1], [0, 0, 6], [0, 3, 0], [5, 0], [1, 3], [0, 0, 7], [0, 0, 8], [0, 0, 9]),
    *([6, 0], [0, 4, 0], [1, 4], [7, 0], [0, 1, 2], [2, 0, 0], [3, 1], [2, 2], [8, 0], [0, 5, 0]),
    *([1, 5], [1, 0, 1], [0, 2, 1], [9, 0], [0, 6, 0], [0, 0, 0, 1], [1, 6], [0, 7, 0]),
]


def make_lattice(num_frames: int = 5, width: int = 10) -> Lattice:
    """Rank r of frame t is the label 100 t + r; blanks, which Medusa has none of, get some mass."""
    random = np.random.default_rng(0)
    weights = -np.sort(-random.random((num_frames, width)), axis=1)
    return Lattice(
        100 * np.arange(num_frames)[:, None] + np.arange(width),
        np.log(weights / weights.sum(1, keepdims=True) * 0.9).astype(np.float32),
        np.log(np.full(num_frames, 0.1, np.float32)),
    )


def check(lattice: Lattice, num_nodes: int, choices: list[list[int]]) -> None:
    """The tree is the root and these choices, in this order."""
    tree = medusa_search(lattice, root_token=ROOT, num_nodes=num_nodes)
    assert len(tree) == 1 + len(choices)
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (ROOT, ROOT_PARENT, 0)
    assert tree.log_probs[0] == 0
    for node, choice in enumerate(choices, 1):
        assert tree.path(node) == [100 * frame + rank for frame, rank in enumerate(choice)]
        parent = choices.index(choice[:-1]) + 1 if choice[:-1] else 0
        assert tree.parents[node] == parent < node
        assert tree.depths[node] == len(choice)
        expected = sum(float(lattice.frame_logprobs[frame, rank]) for frame, rank in enumerate(choice))
        assert tree.log_probs[node] == pytest.approx(expected, rel=1e-12)
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int64] * 3
    assert tree.log_probs.dtype == np.float64


@pytest.mark.parametrize("num_nodes", [63, 64, 256])
def test_the_published_tree(num_nodes: int) -> None:
    assert len(MC_SIM_7B_63) == 63
    check(make_lattice(), num_nodes, MC_SIM_7B_63)


@pytest.mark.parametrize("num_nodes", [0, 1, 5, 36, 37, 62])
def test_fewer_nodes_are_the_first_of_them(num_nodes: int) -> None:
    check(make_lattice(), num_nodes, MC_SIM_7B_63[:num_nodes])


@pytest.mark.parametrize(("num_frames", "width"), [(1, 10), (2, 10), (3, 4), (8, 1), (4, 10)])
@pytest.mark.parametrize("num_nodes", [63, 6])
def test_what_a_head_has_no_frames_or_labels_for_is_left_out(
    num_frames: int, width: int, num_nodes: int
) -> None:
    """The places go to the next nodes that it can fill."""
    fits = [choice for choice in MC_SIM_7B_63 if len(choice) <= num_frames and max(choice) < width]
    check(make_lattice(num_frames, width), num_nodes, fits[:num_nodes])


def test_the_lattice_is_not_edited() -> None:
    lattice = make_lattice()
    before = copy.deepcopy(lattice)
    medusa_search(lattice, root_token=ROOT, num_nodes=63)
    np.testing.assert_array_equal(lattice.frame_tokens, before.frame_tokens)
    np.testing.assert_array_equal(lattice.frame_logprobs, before.frame_logprobs)
