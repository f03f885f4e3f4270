"""The best chain of a tree, and of a lattice."""

import numpy as np
import pytest
from hypothesis import given, settings

from runtime.trees.chains import best_chain, chain_search
from runtime.trees.lattice import Lattice
from runtime.trees.token_tree import ROOT_PARENT, TokenTree
from tests.lattice_oracles import ROOT, brute_force, lattices

# The prefix search leaves out frames that it reaches with less than 1e-6 of a prefix's probability.
PSI_RTOL = 1e-5
# Times CHAIN_SEARCH, more than the prefixes of the largest lattice of ``lattices``.
ALL_NODES = 100


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_best_chain(seed: int, length: int) -> None:
    """Against every path of a random tree."""
    random = np.random.default_rng(seed)
    parents, depths, log_probs = [ROOT_PARENT], [0], [0.0]
    for node in range(1, 14):
        parent = int(random.integers(max(0, node - 4), node))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        log_probs.append(log_probs[parent] + float(np.log(random.random())))
    tokens = np.arange(100, 114)
    tree = TokenTree(tokens, np.array(parents), np.array(depths), np.array(log_probs))
    paths = [tree.path(node)[:length] for node in range(14)]
    expected = max(sum(np.exp(log_probs[token - 100]) for token in path) for path in paths)
    chain = best_chain(tree, length)
    assert chain.tokens[1:].tolist() in paths
    assert np.exp(chain.log_probs[1:]).sum() == pytest.approx(expected)
    assert chain.parents.tolist() == [depth - 1 for depth in chain.depths]
    assert chain.depths.tolist() == list(range(len(chain)))


@settings(max_examples=100)
@given(lattice=lattices())
def test_chain_search_equals_brute_force(lattice: Lattice) -> None:
    """With room for all prefixes, the chain is the best of all paths."""
    expected = brute_force(lattice)
    chain = chain_search(lattice, root_token=ROOT, num_nodes=ALL_NODES)
    sums = [sum(expected[prefix[:depth]] for depth in range(1, len(prefix) + 1)) for prefix in expected]
    path = tuple(chain.path(len(chain) - 1))
    assert chain.parents.tolist() == list(range(-1, len(chain) - 1))
    assert path in expected or not expected
    assert np.exp(chain.log_probs[1:]).sum() == pytest.approx(
        max(sums, default=0.0), rel=PSI_RTOL, abs=PSI_RTOL
    )
