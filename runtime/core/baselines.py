"""Published ways from a lattice to a tree, for comparison with the prefix search only.

``paper_search`` is the CTC transform of the seed paper (CTC-drafter: Wen, Gui, Feng, 2024, section 3.3). It
takes the top-k entries of every frame, blank among them, expands a fixed tree of raw paths, collapses every
path, drops duplicates and corrects the attention mask. Several raw paths that collapse alike waste each
other's places, and a collapsed prefix is known only by the probability of single paths. ``medusa_search`` is
Medusa's (arXiv 2401.10774). ``uncollapsed_search`` measures what collapsing is worth.
"""

import heapq
from collections.abc import Mapping
from functools import cache
from itertools import count
from typing import Any

import numpy as np

from runtime.core.lattice import Lattice, Search
from runtime.core.prefix_search import prefix_search, search_tree
from runtime.core.token_tree import ROOT_PARENT, TokenTree

# Raw nodes expanded for every collapsed node that is wanted, since several raw nodes collapse to one.
RAW_PER_NODE = 4
# The fixed tree's shape: how likely the entry of each rank is assumed to be, relative to the first.
RANK_DECAY = 0.45
FRAME_DECAY = 0.85


@cache
def fixed_tree(num_frames: int, width: int, size: int) -> tuple[tuple[int, ...], ...]:
    """``size`` raw paths as rank tuples, a parent before its children: the same for every step.

    The best under the assumption that rank r of any frame is right in proportion to RANK_DECAY^r.
    """
    order = count()
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, next(order), ())]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) <= size:
        score, _, path = heapq.heappop(heap)
        paths.append(path)
        if len(path) < num_frames:
            for rank in range(width):
                child = score * FRAME_DECAY * RANK_DECAY**rank
                heapq.heappush(heap, (child, next(order), (*path, rank)))
    return tuple(paths[1:])


def paper_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """Collapse a fixed tree of raw paths; at most ``num_nodes`` different drafts, most probable first.

    A draft's score is the summed probability of the raw nodes that collapse to it.
    """
    num_frames, width = lattice.frame_tokens.shape
    blank = -1
    # The blank takes its rank among each frame's labels.
    tokens = np.column_stack([lattice.frame_tokens, np.full(num_frames, blank)])
    log_probs = np.column_stack([lattice.frame_logprobs, lattice.blank_logprobs]).astype(np.float64)
    ranked = np.argsort(-log_probs, axis=1, kind="stable")
    tokens = np.take_along_axis(tokens, ranked, 1)
    probs = np.exp(np.take_along_axis(log_probs, ranked, 1))

    # Raw path -> (collapsed prefix, last raw token, probability)
    raw: dict[tuple[int, ...], tuple[tuple[int, ...], int, float]] = {(): ((), blank, 1.0)}
    scores: dict[tuple[int, ...], float] = {}
    for path in fixed_tree(num_frames, width + 1, RAW_PER_NODE * num_nodes):
        prefix, last, probability = raw[path[:-1]]
        frame, rank = len(path) - 1, path[-1]
        token = int(tokens[frame, rank])
        probability *= probs[frame, rank]
        if token not in (blank, last) and probability > 0:
            prefix = (*prefix, token)
            scores[prefix] = scores.get(prefix, 0.0) + probability
        raw[path] = (prefix, token, probability)
    return _collapsed_tree(scores, root_token, num_nodes)


def _collapsed_tree(scores: dict[tuple[int, ...], float], root_token: int, num_nodes: int) -> TokenTree:
    """The best drafts whose parents are kept as well."""
    # A prefix may score above its own parent here: sort by the weakest of its ancestors.
    weakest: dict[tuple[int, ...], float] = {(): 1.0}
    for prefix in sorted(scores, key=len):
        weakest[prefix] = min(scores[prefix], weakest[prefix[:-1]])
    kept = sorted(scores, key=lambda p: (-weakest[p], len(p)))[:num_nodes]
    return _tree(root_token, {prefix: (prefix[-1], float(np.log(weakest[prefix]))) for prefix in kept})


def _tree(root_token: int, nodes: Mapping[Any, tuple[int, float]]) -> TokenTree:
    """The tree of some paths, a parent before its children; by path its last token and log-probability."""
    place = {path: node for node, path in enumerate(nodes, 1)}
    parents = [ROOT_PARENT, *(place.get(path[:-1], 0) for path in nodes)]
    tokens = [root_token, *(token for token, _ in nodes.values())]
    log_probs = [0.0, *(log_prob for _, log_prob in nodes.values())]
    numbers = np.array([tokens, parents, [0, *map(len, nodes)]], np.int64)
    return TokenTree(numbers[0], numbers[1], numbers[2], np.array(log_probs))


# Medusa's sparse tree for Vicuna-7B (arXiv 2401.10774, ``mc_sim_7b_63``): for every node, the rank of
# the label that each head contributes, in the order in which its authors' search added them. Written
# as digits; "010" is head 1's best label, head 2's second, head 3's best.
MEDUSA_63 = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 "
    "003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 "
    "101 021 90 060 0001 16 070"
)


def medusa_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """The first ``num_nodes`` nodes of Medusa's tree, as many as the head has frames and labels for.

    A node's score is the product of its labels' probabilities: the heads are independent.
    """
    num_frames, width = lattice.frame_tokens.shape
    nodes: dict[str, tuple[int, float]] = {}
    for path in MEDUSA_63.split():
        frame, rank, above = len(path) - 1, int(path[-1]), path[:-1]
        if len(nodes) == num_nodes:
            break
        if frame >= num_frames or rank >= width or (above and above not in nodes):
            continue
        log_prob = nodes[above][1] if above else 0.0
        log_prob += float(lattice.frame_logprobs[frame, rank])
        nodes[path] = int(lattice.frame_tokens[frame, rank]), log_prob
    return _tree(root_token, nodes)


def uncollapsed_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """Take frame t as the t-th draft token, whatever the head was trained for."""
    return search_tree(lattice, root_token, num_nodes, with_blanks=False)


# All searches by name, for command lines that compare them.
SEARCHES: dict[str, Search] = {
    "prefix": prefix_search,
    "paper": paper_search,
    "uncollapsed": uncollapsed_search,
    "medusa": medusa_search,
}
