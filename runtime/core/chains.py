"""Trees of one path, for engines that verify drafts in a row, and to measure what branches are worth."""

from runtime.core.lattice import Lattice
from runtime.core.prefix_search import search_tree
from runtime.core.token_tree import TokenTree


def chain_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """The most probable prefix of one label, its most probable child, and so on, ``num_nodes`` times at most.

    Exact over the labels that the lattice holds, as ``prefix_search`` is.
    """
    return search_tree(lattice, root_token, num_nodes, with_blanks=True, is_chain=True)
