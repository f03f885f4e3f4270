"""The expansion of levels on a device finds the trees that the host finds."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from export.step.levels import Level, frontier_of, tree_of_levels
from runtime.core.level_expansion import TreeExpansion
from runtime.core.token_tree import TokenTree

VOCAB_SIZE = 50
Path = tuple[int, ...]


def children(path: Path, count: int, *, with_certain: bool) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """What a head says after a path, [K]: the same whenever it is asked."""
    random = np.random.default_rng([count, *path])
    log_probs = -np.sort(random.exponential(2.0, count)).astype(np.float32)
    if with_certain and random.random() < 0.5:
        log_probs[0], log_probs[1:] = 1e-6, -np.inf
    return random.permutation(VOCAB_SIZE)[:count], log_probs


def host_tree(count: int, width: int, depth: int, num_nodes: int, with_certain: bool) -> TokenTree:
    expansion, paths = TreeExpansion(7, num_nodes), [(7,)]
    for level in range(depth):
        found = [children(path, count, with_certain=with_certain) for path in paths]
        expansion.add(np.array([tokens for tokens, _ in found]), np.array([probs for _, probs in found]))
        frontier = expansion.frontier(width)
        if level + 1 == depth or not frontier.tokens.size:
            break
        paths = [
            (*paths[at], int(token)) for at, token in zip(frontier.parents, frontier.tokens, strict=True)
        ]
    return expansion.tree()


def device_tree(count: int, width: int, depth: int, num_nodes: int, with_certain: bool) -> TokenTree:
    paths: list[Path] = [(7,)]
    scores, levels = torch.zeros(1, 1), []
    chosen = None
    for level in range(depth):
        found = [children(path, count, with_certain=with_certain) for path in paths]
        tokens = torch.from_numpy(np.array([[tokens for tokens, _ in found]]))
        log_probs = torch.from_numpy(np.array([[probs for _, probs in found]]))
        levels.append(Level(tokens, log_probs, *((scores, chosen) if level else ())))
        frontier = frontier_of(tokens, log_probs, scores, width=width)
        scores, chosen = frontier.scores, frontier.chosen
        pairs = zip(frontier.parents[0].tolist(), frontier.tokens[0].tolist(), strict=True)
        paths = [(*paths[at], token) for at, token in pairs]
    tree = tree_of_levels(levels, torch.tensor([[7]]), num_nodes=num_nodes)
    parents = tree.parents[0].numpy()
    assert (parents < np.arange(num_nodes + 1)).all()
    exists = (parents >= 0) | (np.arange(num_nodes + 1) == 0)
    # What does not exist is behind what does, and has no share in anything.
    assert (np.diff(exists.astype(int)) <= 0).all()
    assert not tree.ancestors[0].numpy()[exists][:, ~exists].any()
    assert torch.isneginf(tree.log_probs[0][~torch.from_numpy(exists)]).all()
    expected = np.eye(num_nodes + 1, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            expected[node] |= expected[parent]
    assert (tree.ancestors[0].numpy() == expected).all()
    tokens, parents, depths = (each[0].numpy()[exists] for each in (tree.tokens, tree.parents, tree.depths))
    return TokenTree(tokens, parents, depths, tree.log_probs[0].numpy()[exists].astype(np.float64))


def paths_of(tree: TokenTree) -> dict[Path, float]:
    """Every node's log-probability by the tokens on the way to it."""
    found: list[Path] = []
    for node, parent in enumerate(tree.parents):
        above = found[parent] if parent >= 0 else ()
        found.append((*above, int(tree.tokens[node])))
        assert tree.depths[node] == len(above)
    return dict(zip(found, tree.log_probs.tolist(), strict=True))


@pytest.mark.parametrize("with_certain", [False, True])
@pytest.mark.parametrize(
    ("count", "width", "depth", "num_nodes"),
    [(5, 3, 4, 8), (5, 3, 4, 2), (5, 3, 1, 5), (2, 4, 5, 40), (1, 3, 3, 4), (6, 1, 3, 12), (4, 4, 6, 300)],
)
def test_the_tree_is_the_host_s(
    count: int, width: int, depth: int, num_nodes: int, with_certain: bool
) -> None:
    """With more nodes than there are, with beams wider than a root's children, and with certain children."""
    arguments = count, width, min(depth, num_nodes), num_nodes, with_certain
    assert paths_of(device_tree(*arguments)) == pytest.approx(paths_of(host_tree(*arguments)), abs=1e-4)
