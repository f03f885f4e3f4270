"""The search without collapsing, to measure what collapsing is worth."""

from runtime.core.lattice import Lattice
from runtime.core.prefix_search import search_tree
from runtime.core.token_tree import TokenTree


def uncollapsed_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """Take frame t as the t-th draft token, whatever the head was trained for."""
    return search_tree(lattice, root_token, num_nodes, with_blanks=False)
