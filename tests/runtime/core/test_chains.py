"""The chain of a lattice against brute force over every frame path."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.lattice import Lattice
from runtime.core.prefix_search import chain_search
from tests.lattice_oracles import (
    ROOT,
    Prefix,
    brute_force,
    lattices,
    unmerged_lattices,
    walk_unmerged,
)

# As for the prefix search, whose negligible frames are left out here too.
PSI_RTOL, PSI_ATOL = 1e-5, 1e-5


@pytest.mark.parametrize(
    ("kind", "oracle"), [(lattices, brute_force), (unmerged_lattices, walk_unmerged)], ids=["merged", "not"]
)
def test_every_node_is_the_most_probable_child(
    kind: Callable[[], st.SearchStrategy[Lattice]], oracle: Callable[[Lattice], dict[Prefix, float]]
) -> None:
    @settings(max_examples=100)
    @given(lattice=kind(), num_nodes=st.integers(0, 6))
    def check(lattice: Lattice, num_nodes: int) -> None:
        expected = oracle(lattice)
        chain = chain_search(lattice, root_token=ROOT, num_nodes=num_nodes)
        count = len(chain) - 1
        assert chain.parents.tolist() == list(range(-1, count))
        assert chain.depths.tolist() == list(range(count + 1))
        path = tuple(chain.path(count))
        for depth in range(1, count + 1):
            children = [psi for prefix, psi in expected.items() if prefix[:-1] == path[: depth - 1]]
            found = pytest.approx(max(children), rel=PSI_RTOL, abs=PSI_ATOL)
            assert expected[path[:depth]] == found
            assert np.exp(chain.log_probs[depth]) == found
        if count < num_nodes:
            rest = [psi for prefix, psi in expected.items() if prefix[:-1] == path]
            assert max(rest, default=0.0) <= PSI_ATOL

    check()
