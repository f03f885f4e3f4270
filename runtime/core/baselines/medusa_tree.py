"""Published fixed trees over the ranks of independent heads' labels."""

import numpy as np

from runtime.core.lattice import Lattice
from runtime.core.token_tree import ROOT_PARENT, TokenTree

# Medusa's sparse tree for Vicuna-7B (arXiv 2401.10774, ``mc_sim_7b_63``): for every node, the rank of
# the label that each head contributes, in the order in which its authors' search added them. Written
# as strings of digits; "010" is head 1's best label, head 2's second, head 3's best.
_MEDUSA_63_RANKS = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 "
    "003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 "
    "101 021 90 060 0001 16 070"
)
MEDUSA_63 = tuple(_MEDUSA_63_RANKS.split())


def medusa_transform(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """The first ``num_nodes`` nodes of Medusa's tree, as many as the head has frames and labels for.

    A node's score is the product of its labels' probabilities: the heads are independent.
    """
    num_frames, width = lattice.frame_tokens.shape
    index = {"": 0}
    tokens, parents, depths, log_probs = [root_token], [ROOT_PARENT], [0], [0.0]
    for path in MEDUSA_63:
        rank = int(path[-1])
        if len(index) > num_nodes:
            break
        if len(path) > num_frames or rank >= width or path[:-1] not in index:
            continue
        parent = index[path[:-1]]
        index[path] = len(tokens)
        tokens.append(int(lattice.frame_tokens[len(path) - 1, rank]))
        parents.append(parent)
        depths.append(len(path))
        log_probs.append(log_probs[parent] + float(lattice.frame_logprobs[len(path) - 1, rank]))
    return TokenTree(
        np.array(tokens, np.int64),
        np.array(parents, np.int64),
        np.array(depths, np.int64),
        np.array(log_probs),
    )
