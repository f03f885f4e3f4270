"""CTC search: from a lattice to the most probable collapsed prefixes.

A path through the frames collapses to a label sequence: repeats are merged, then blanks dropped
(Graves et al., 2006); without merging, blanks are dropped only. The score of a prefix is psi, the
total probability of all paths whose collapse starts with it. With, after t frames, ``ends_blank[t]``
the probability of having emitted exactly the prefix and ended in a blank, and ``ends_label[t]`` of
having ended in its last label,

    psi(prefix + k) = sum_t p_t(k | last) * (ends_blank[t-1] + [k != last] * ends_label[t-1]).

p_t depends on the last label of the prefix where the lattice has a transition, which a prefix always
knows: the recursion stays exact, and only labels that became nodes are ever worked out. A parent's psi
is at least its child's, so the N best prefixes form a tree, and taking the best frontier prefix N times
finds them exactly, but for frames that a prefix reaches with less than ``NEGLIGIBLE`` of its probability.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.trees.lattice import Lattice
from runtime.trees.token_tree import ROOT_PARENT, TokenTree

# A fifth of a small search's time, for nothing that shows: psi changes by 1e-5 of itself.
NEGLIGIBLE = 1e-6


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
    labels that the lattice holds. Compiled; the profiler shows its time as ``transform``.
    """
    return _tree(lattice, anchor, num_nodes, with_blanks=True)


def uncollapsed_search(lattice: Lattice, *, anchor: int, num_nodes: int) -> TokenTree:
    """The same without blanks: frame t is taken as the t-th draft token, whatever the head was trained
    for. What collapsing is worth shows in the difference."""
    return _tree(lattice, anchor, num_nodes, with_blanks=False)


def _tree(lattice: Lattice, anchor: int, num_nodes: int, *, with_blanks: bool) -> TokenTree:
    transition = lattice.transition
    tokens, parents, depths, psi = _search(
        lattice.frame_tokens,
        lattice.frame_logprobs,
        lattice.blank_logprobs,
        transition.frames,
        transition.anchor,
        transition.previous,
        transition.following,
        anchor,
        lattice.merges_repeats and with_blanks,
        with_blanks,
        num_nodes,
    )
    return TokenTree(tokens, parents, depths, np.log(psi))


# What may be reordered to use wide registers; infinities stay what they are.
@njit(cache=True, fastmath={"reassoc", "contract", "arcp", "nsz"})
def _follow(
    frame: NDArray[np.float32],
    row: NDArray[np.float32],
    following: NDArray[np.float32],
    logprobs: NDArray[np.float32],
    blank_logprob: float,
    rest: float,
    hidden: NDArray[np.float32],
    probs: NDArray[np.float64],
) -> None:
    """One frame's probabilities after the label with this row, into ``probs`` [K + 1], the blank last.

    frame [r] or [0], row [r], following [K or K + 1, r], logprobs [K]; rest: mass of all other labels;
    hidden [r] is scratch space.
    """
    size, width = row.size, logprobs.size
    if frame.size:
        for index in range(size):
            x = frame[index] + row[index]
            hidden[index] = x / (np.float32(1) + np.exp(-x))
    else:
        hidden[:] = row
    best = np.log(rest) if rest > 0.0 else -np.inf
    for k in range(width + 1):
        logit = np.float64(logprobs[k]) if k < width else blank_logprob
        if k < following.shape[0]:
            moved = np.float32(0)
            for index in range(size):
                moved += hidden[index] * following[k, index]
            logit += moved
        probs[k] = logit
        best = max(best, logit)
    # The best is taken out, so that nothing overflows.
    total = rest * np.exp(-best)
    for k in range(width + 1):
        probs[k] = np.exp(probs[k] - best)
        total += probs[k]
    for k in range(width + 1):
        probs[k] /= total


@njit(cache=True)
def _search(
    frame_tokens: NDArray[np.int64],
    frame_logprobs: NDArray[np.float32],
    blank_logprobs: NDArray[np.float32],
    frame_rows: NDArray[np.float32],
    anchor_row: NDArray[np.float32],
    previous_rows: NDArray[np.float32],
    following_rows: NDArray[np.float32],
    anchor: int,
    merges_repeats: bool,
    with_blanks: bool,
    num_nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    num_frames, width = frame_tokens.shape
    labels = np.unique(frame_tokens.copy().ravel())
    column = np.zeros((num_frames, width), np.int64)
    # Somewhere in the frames where a label stands.
    place = np.zeros((labels.size, 2), np.int64)
    for frame in range(num_frames):
        for rank in range(width):
            label = np.searchsorted(labels, frame_tokens[frame, rank])
            column[frame, rank] = label
            place[label] = frame, rank
    # By frame, the blank last: after a node's label; without a transition the same after all of them.
    probs = np.zeros((num_frames, width + 1))
    probs[:, :width] = np.exp(frame_logprobs.astype(np.float64))
    probs[:, width] = np.exp(blank_logprobs.astype(np.float64))
    has_transition = anchor_row.size > 0
    rest = np.zeros(num_frames)
    if has_transition:
        for frame in range(num_frames):
            rest[frame] = max(0.0, 1.0 - probs[frame].sum())
    hidden = np.zeros(anchor_row.size, np.float32)
    row = anchor_row

    size = num_nodes + 1
    tokens = np.zeros(size, np.int64)
    label_of = np.full(size, -1)
    parents = np.full(size, ROOT_PARENT)
    depths = np.zeros(size, np.int64)
    psi = np.zeros(size)
    ends_blank = np.zeros((size, num_frames + 1))
    ends_label = np.zeros((size, num_frames + 1))
    # The first frame that a node's children may use: none before its own.
    first_frame = np.zeros(size, np.int64)
    psi[0] = 1.0
    tokens[0] = anchor
    ends_blank[0, 0] = 1.0

    # The frontier's best candidates, best first: no other can ever be chosen. emitted[c, t] is the
    # probability of emitting the candidate's label at frame t as the first time.
    candidate_psi = np.zeros(size)
    candidate_parent = np.zeros(size, np.int64)
    candidate_label = np.zeros(size, np.int64)
    emitted = np.zeros((size, num_frames))
    scores = np.zeros(labels.size)
    by_frame = np.zeros((labels.size, num_frames))
    num_candidates = 0
    count = 1
    node = 0
    while count < size:
        scores[:] = 0.0
        by_frame[:] = 0.0
        for frame in range(first_frame[node], num_frames):
            before = ends_blank[node, frame] + ends_label[node, frame]
            if before <= NEGLIGIBLE * psi[node]:
                continue
            if has_transition:
                _follow(
                    frame_rows[frame],
                    row,
                    following_rows[frame],
                    frame_logprobs[frame],
                    blank_logprobs[frame],
                    rest[frame],
                    hidden,
                    probs[frame],
                )
            # Every child of the newest node joins the frontier.
            for rank in range(width):
                label = column[frame, rank]
                probability = probs[frame, rank]
                if merges_repeats and label == label_of[node]:
                    # The node's own recursion: its label again, merged or after a blank.
                    ends_label[node, frame + 1] += probability * ends_label[node, frame]
                    probability *= ends_blank[node, frame]
                else:
                    probability *= before
                scores[label] += probability
                by_frame[label, frame] = probability
            if with_blanks:
                ends_blank[node, frame + 1] += probs[frame, width] * before
        room = size - count
        for label in range(labels.size):
            score = scores[label]
            if score <= 0.0 or (num_candidates >= room and score <= candidate_psi[num_candidates - 1]):
                continue
            position = min(num_candidates, room - 1)
            while position > 0 and candidate_psi[position - 1] < score:
                candidate_psi[position] = candidate_psi[position - 1]
                candidate_parent[position] = candidate_parent[position - 1]
                candidate_label[position] = candidate_label[position - 1]
                emitted[position] = emitted[position - 1]
                position -= 1
            candidate_psi[position] = score
            candidate_parent[position] = node
            candidate_label[position] = label
            emitted[position] = by_frame[label]
            num_candidates = min(num_candidates + 1, room)
        if num_candidates == 0:
            break

        # The best candidate becomes a node.
        node, parent, label = count, candidate_parent[0], candidate_label[0]
        tokens[node], label_of[node], parents[node] = labels[label], label, parent
        if has_transition:
            row = previous_rows[place[label, 0], place[label, 1]]
        psi[node] = candidate_psi[0]
        depths[node] = depths[parent] + 1
        first_frame[node] = num_frames
        for frame in range(num_frames - 1, -1, -1):
            # Where repeats do not merge, what was just emitted is as good as a blank behind it.
            if merges_repeats:
                ends_label[node, frame + 1] = emitted[0, frame]
            else:
                ends_blank[node, frame + 1] = emitted[0, frame]
            if emitted[0, frame] > 0.0:
                first_frame[node] = frame + 1
        count += 1
        num_candidates -= 1
        for index in range(num_candidates):
            candidate_psi[index] = candidate_psi[index + 1]
            candidate_parent[index] = candidate_parent[index + 1]
            candidate_label[index] = candidate_label[index + 1]
            emitted[index] = emitted[index + 1]
    return tokens[:count], parents[:count], depths[:count], psi[:count]
