"""CTC search: from a lattice to the most probable collapsed prefixes.

A path through the frames collapses to a label sequence: repeats are merged, then blanks dropped
(Graves et al., 2006). The score of a prefix is psi, the total probability of all paths whose
collapse starts with it. With, after t frames, ``ends_blank[t]`` the probability of having emitted
exactly the prefix and ended in a blank, and ``ends_label[t]`` of having ended in its last label,

    psi(prefix + k) = sum_t p_t(k) * (ends_blank[t-1] + [k != last] * ends_label[t-1]).

A parent's psi is at least its child's, so the N best prefixes form a tree, and taking the best
frontier prefix N times finds them exactly.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.lattice import Lattice
from runtime.tree import ROOT_PARENT, TokenTree


def collapse(path: Sequence[int], *, blank: int) -> list[int]:
    """Merge repeats, then drop blanks. Example (blank=0): [5, 5, 0, 5, 7, 7] -> [5, 5, 7]."""
    return [
        label
        for index, label in enumerate(path)
        if label != blank and (index == 0 or label != path[index - 1])
    ]


def prefix_search(lattice: Lattice, *, anchor: int, num_nodes: int) -> TokenTree:
    """The ``num_nodes`` most probable collapsed prefixes (fewer if no more have any probability).

    Nodes come in descending order of probability, so the first n are the best n. Exact over the
    labels that the lattice holds. Compiled; about 20 us for 16 nodes of an 8 by 16 lattice.
    """
    tokens, parents, depths, psi = _search(
        lattice.frame_tokens,
        np.exp(lattice.frame_logprobs.astype(np.float64)),
        np.exp(lattice.blank_logprobs.astype(np.float64)),
        num_nodes,
    )
    tokens[0] = anchor
    return TokenTree(tokens, parents, depths, np.log(psi))


@njit(cache=True)
def _search(
    frame_tokens: NDArray[np.int64],
    frame_probs: NDArray[np.float64],
    blank_probs: NDArray[np.float64],
    num_nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    num_frames, width = frame_tokens.shape
    labels = np.unique(frame_tokens.copy().ravel())
    # label_probs[l, t]: probability of label l at frame t, 0 where it is not in the frame's top K.
    label_probs = np.zeros((labels.size, num_frames))
    for frame in range(num_frames):
        for rank in range(width):
            label_probs[np.searchsorted(labels, frame_tokens[frame, rank]), frame] = frame_probs[frame, rank]

    size = num_nodes + 1
    label_of = np.full(size, -1)
    parents = np.full(size, ROOT_PARENT)
    depths = np.zeros(size, np.int64)
    psi = np.zeros(size)
    ends_blank = np.zeros((size, num_frames + 1))
    ends_label = np.zeros((size, num_frames + 1))
    psi[0] = 1.0
    ends_blank[0, 0] = 1.0
    for frame in range(num_frames):
        ends_blank[0, frame + 1] = ends_blank[0, frame] * blank_probs[frame]

    # The frontier's best candidates, best first: no other can ever be chosen.
    candidate_psi = np.zeros(size)
    candidate_parent = np.zeros(size, np.int64)
    candidate_label = np.zeros(size, np.int64)
    num_candidates = 0
    count = 1
    node = 0
    while True:
        # Every child of the newest node joins the frontier.
        room = size - count
        for label in range(labels.size):
            score = 0.0
            repeats = label == label_of[node]
            for frame in range(num_frames):
                before = ends_blank[node, frame]
                if not repeats:
                    before += ends_label[node, frame]
                score += label_probs[label, frame] * before
            if score <= 0.0 or (num_candidates >= room and score <= candidate_psi[num_candidates - 1]):
                continue
            position = min(num_candidates, room - 1)
            while position > 0 and candidate_psi[position - 1] < score:
                candidate_psi[position] = candidate_psi[position - 1]
                candidate_parent[position] = candidate_parent[position - 1]
                candidate_label[position] = candidate_label[position - 1]
                position -= 1
            candidate_psi[position] = score
            candidate_parent[position] = node
            candidate_label[position] = label
            num_candidates = min(num_candidates + 1, room)
        if num_candidates == 0 or count == size:
            break

        # The best candidate becomes a node.
        node, parent, label = count, candidate_parent[0], candidate_label[0]
        label_of[node], parents[node], psi[node] = label, parent, candidate_psi[0]
        depths[node] = depths[parent] + 1
        repeats = label == label_of[parent]
        for frame in range(num_frames):
            before = ends_blank[parent, frame]
            if not repeats:
                before += ends_label[parent, frame]
            ends_label[node, frame + 1] = label_probs[label, frame] * (ends_label[node, frame] + before)
            ends_blank[node, frame + 1] = blank_probs[frame] * (
                ends_blank[node, frame] + ends_label[node, frame]
            )
        count += 1
        num_candidates -= 1
        candidate_psi[:num_candidates] = candidate_psi[1 : num_candidates + 1].copy()
        candidate_parent[:num_candidates] = candidate_parent[1 : num_candidates + 1].copy()
        candidate_label[:num_candidates] = candidate_label[1 : num_candidates + 1].copy()
        if count == size:
            break

    tokens = np.zeros(count, np.int64)
    for index in range(1, count):
        tokens[index] = labels[label_of[index]]
    return tokens, parents[:count], depths[:count], psi[:count]
