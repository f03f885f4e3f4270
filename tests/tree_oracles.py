"""Slow references for trees that are expanded level by level."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.level_expansion import TreeExpansion
from runtime.core.token_tree import ROOT_PARENT, TokenTree
from tests.fake_heads import Children

ROOT = 7
UNLIMITED = 10_000
# Both sides start from the same float32 log-probabilities and add in float64, in the same order.
RTOL = 1e-12


def random_children(seed: int, width: int, sharpness: float = 2.0) -> Children:
    """A random distribution over children after every sequence of tokens."""

    def found(tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        random = np.random.default_rng((seed, len(tokens), *tokens))
        weights = np.exp(random.normal(size=width + 2) * sharpness)
        log_probs = np.sort(np.log(weights / weights.sum()))[::-1][:width]
        return random.permutation(20)[:width], log_probs.astype(np.float32)

    return found


def exhaustive(children: Children, context: Sequence[int], depth: int) -> dict[tuple[int, ...], float]:
    """Log-probabilities of every path below the context's last token."""
    found: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        below = {}
        for path, score in level.items():
            tokens, log_probs = children([*context, *path])
            for token, log_prob in zip(tokens.tolist(), log_probs.tolist(), strict=True):
                below[*path, token] = score + log_prob
        found |= below
        level = below
    return found


def check_best(tree: TokenTree, expected: dict[tuple[int, ...], float], num_nodes: int) -> None:
    """The tree holds the best nodes of all, best first, each after its parent."""
    paths = [tuple(tree.path(node)) for node in range(1, len(tree))]
    assert len(paths) == len(set(paths)) == min(num_nodes, len(expected))
    np.testing.assert_allclose(tree.log_probs[1:], [expected[path] for path in paths], rtol=RTOL)
    best = sorted(expected.values(), reverse=True)[:num_nodes]
    np.testing.assert_allclose(tree.log_probs[1:], best, rtol=RTOL)
    check_valid(tree)


def check_valid(tree: TokenTree) -> None:
    assert (tree.tokens[0], tree.parents[0], tree.depths[0]) == (ROOT, ROOT_PARENT, 0)
    assert tree.log_probs[0] == 0.0
    assert np.all(tree.parents[1:] < np.arange(1, len(tree)))
    assert np.array_equal(tree.depths[1:], tree.depths[tree.parents[1:]] + 1)
    assert np.all(np.diff(tree.log_probs) <= 0)
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int64] * 3
    assert tree.log_probs.dtype == np.float64


def expand(children: Children, depth: int, num_nodes: int, beam_width: int) -> tuple[TokenTree, list[int]]:
    """The tree, and how many nodes of every level were expanded."""
    expansion = TreeExpansion(ROOT, num_nodes)
    paths: list[tuple[int, ...]] = [()]
    expanded = []
    for level in range(depth):
        found = [children([ROOT, *path]) for path in paths]
        expansion.add(np.array([tokens for tokens, _ in found]), np.array([probs for _, probs in found]))
        frontier = expansion.frontier(beam_width)
        chosen = zip(frontier.parents, frontier.tokens, strict=True)
        paths = [(*paths[parent], int(token)) for parent, token in chosen]
        if not paths:
            break
        if level < depth - 1:
            expanded.append(len(paths))
    return expansion.tree(), expanded
