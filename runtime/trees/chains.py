"""Trees of one path, for engines that verify drafts in a row, and to measure what branches are worth."""

import numpy as np

from runtime.trees.lattice import Lattice
from runtime.trees.prefix_search import prefix_search
from runtime.trees.token_tree import ROOT_PARENT, TokenTree

TREE, CHAIN = "tree", "chain"
SHAPES = (TREE, CHAIN)
# A chain is the best path of a search for this many times as many nodes; with more, chains hardly change.
CHAIN_SEARCH = 4


def chain_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """The best chain of at most ``num_nodes`` drafts among the lattice's most probable prefixes."""
    found = prefix_search(lattice, root_token=root_token, num_nodes=CHAIN_SEARCH * num_nodes)
    return best_chain(found, num_nodes)


def best_chain(tree: TokenTree, length: int) -> TokenTree:
    """The path of at most ``length`` drafts on which most are accepted, if the probabilities are right.

    A path's expected number of accepted drafts is the sum of its nodes' prefix probabilities.
    """
    best = np.exp(tree.log_probs)
    best[tree.depths > length] = 0.0
    follower = np.full(len(tree), -1)
    gain = np.zeros(len(tree))
    # Children come after their parents, so a node's own best path is known when its turn comes.
    for node in range(len(tree) - 1, 0, -1):
        best[node] += gain[node]
        parent = int(tree.parents[node])
        if best[node] > gain[parent]:
            gain[parent], follower[parent] = best[node], node
    path = [0]
    while follower[path[-1]] >= 0 and len(path) <= length:
        path.append(int(follower[path[-1]]))
    chain = np.arange(len(path))
    return TokenTree(tree.tokens[path], chain + ROOT_PARENT, chain, tree.log_probs[path])
