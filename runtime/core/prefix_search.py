"""CTC search: from a lattice to the most probable collapsed prefixes.

A path through the frames collapses to a label sequence: repeats are merged, then blanks are dropped (Graves
et al., 2006); without merging, only blanks are dropped. The score of a prefix is its prefix probability psi:
the total probability of all paths whose collapse starts with it. Let ``ends_blank[t]`` be the probability of
having emitted exactly the prefix after t frames and ended in a blank, and ``ends_label[t]`` of having ended
in its last label. Then

    psi(prefix + k) = sum_t p_t(k | last) * (ends_blank[t-1] + [k != last] * ends_label[t-1]).

Where the lattice has a transition, p_t depends on the last label of the prefix, which every prefix knows. So
the recursion stays exact. A parent's prefix probability is at least its child's. Therefore the N best
prefixes form a tree, and taking the best prefix of the frontier N times finds them, up to ``NEGLIGIBLE``.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.lattice import Lattice
from runtime.core.token_tree import ROOT_PARENT, TokenTree

# Frames that a prefix reaches with less than this share of its probability are skipped. Skipping saves 20 %
# of a small search; prefix probabilities change by at most 1e-5 of themselves.
NEGLIGIBLE = 1e-6
# Prefixes that a search in fixed shapes keeps beside the root: so many for each node of the tree, and at
# least so many more.
KEPT_PER_NODE, KEPT_BESIDE = 2, 16


def kept_prefixes(num_nodes: int) -> int:
    """Prefixes with the root that a device's search for so many drafts keeps (``drafters.tree_search``)."""
    return 1 + max(KEPT_PER_NODE * num_nodes, num_nodes + KEPT_BESIDE)


def prefix_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """The ``num_nodes`` most probable collapsed prefixes (fewer if no more have any probability), best first.

    Exact over the labels that the lattice holds.
    """
    return search_tree(lattice, root_token, num_nodes, with_blanks=True)


def chain_search(lattice: Lattice, *, root_token: int, num_nodes: int) -> TokenTree:
    """A tree of one path, for engines that verify drafts in a row and to measure what branches are worth.

    Takes the most probable prefix of one label, then its most probable child, and so on.
    """
    return search_tree(lattice, root_token, num_nodes, with_blanks=True, is_chain=True)


def search_tree(
    lattice: Lattice, root_token: int, num_nodes: int, *, with_blanks: bool, is_chain: bool = False
) -> TokenTree:
    """The search, with or without collapsing; without blanks frame t is the t-th draft token.

    is_chain: each node is a child of the one before
    """
    transition = lattice.transition
    tokens, parents, depths, prefix_probs = _search(
        lattice.frame_tokens,
        lattice.frame_logprobs,
        lattice.blank_logprobs,
        transition.frames,
        transition.root,
        transition.previous,
        transition.following,
        root_token,
        lattice.merges_repeats and with_blanks,
        with_blanks,
        is_chain,
        num_nodes,
    )
    return TokenTree(tokens, parents, depths, np.log(prefix_probs))


# Sums may be reordered, so that the compiler uses wide registers; infinities keep their meaning.
@njit(cache=True, fastmath={"reassoc", "contract", "arcp", "nsz"})
def _follow(
    frame: NDArray[np.float32],
    previous: NDArray[np.float32],
    following: NDArray[np.float32],
    logprobs: NDArray[np.float32],
    blank_logprob: float,
    rest: float,
    hidden: NDArray[np.float32],
    probs: NDArray[np.float64],
) -> None:
    """Write one frame's probabilities after a label into ``probs`` [K + 1], the blank last.

    frame [r] or [0]; previous [r]: the label's row; following [K or K + 1, r]; logprobs [K]
    rest: mass of all other labels; hidden [r]: scratch space
    """
    size, width = previous.size, logprobs.size
    if frame.size:
        for index in range(size):
            x = frame[index] + previous[index]
            hidden[index] = x / (np.float32(1) + np.exp(-x))
    else:
        hidden[:] = previous
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
    # The largest logit is subtracted, so that nothing overflows.
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
    root_row: NDArray[np.float32],
    previous_rows: NDArray[np.float32],
    following_rows: NDArray[np.float32],
    root_token: int,
    merges_repeats: bool,
    with_blanks: bool,
    is_chain: bool,
    num_nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    num_frames, width = frame_tokens.shape
    labels = np.unique(frame_tokens.copy().ravel())
    column = np.zeros((num_frames, width), np.int64)
    # For every label, one frame and rank at which it stands.
    place = np.zeros((labels.size, 2), np.int64)
    for frame in range(num_frames):
        for rank in range(width):
            label = np.searchsorted(labels, frame_tokens[frame, rank])
            column[frame, rank] = label
            place[label] = frame, rank
    # For every frame, the labels' probabilities and the blank's after the newest node's label. Without a
    # transition they are the same after all labels.
    probs = np.zeros((num_frames, width + 1))
    probs[:, :width] = np.exp(frame_logprobs.astype(np.float64))
    probs[:, width] = np.exp(blank_logprobs.astype(np.float64))
    has_transition = root_row.size > 0
    rest = np.zeros(num_frames)
    if has_transition:
        for frame in range(num_frames):
            rest[frame] = max(0.0, 1.0 - probs[frame].sum())
    hidden = np.zeros(root_row.size, np.float32)
    previous = root_row

    size = num_nodes + 1
    tokens = np.zeros(size, np.int64)
    label_of = np.full(size, -1)
    parents = np.full(size, ROOT_PARENT)
    depths = np.zeros(size, np.int64)
    prefix_probs = np.zeros(size)
    ends_blank = np.zeros((size, num_frames + 1))
    ends_label = np.zeros((size, num_frames + 1))
    # The first frame that a node's children may use: none before its own.
    first_frame = np.zeros(size, np.int64)
    prefix_probs[0] = 1.0
    tokens[0] = root_token
    ends_blank[0, 0] = 1.0

    # The best candidates of the frontier, best first; the others can never be chosen. emitted[c, t] is the
    # probability that the candidate's label is emitted at frame t for the first time.
    candidate_prob = np.zeros(size)
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
            if before <= NEGLIGIBLE * prefix_probs[node]:
                continue
            if has_transition:
                _follow(
                    frame_rows[frame],
                    previous,
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
            # Sums of rounded probabilities may leave a certain child a hair above its parent.
            score = min(scores[label], prefix_probs[node])
            if score <= 0.0 or (num_candidates >= room and score <= candidate_prob[num_candidates - 1]):
                continue
            position = min(num_candidates, room - 1)
            while position > 0 and candidate_prob[position - 1] < score:
                candidate_prob[position] = candidate_prob[position - 1]
                candidate_parent[position] = candidate_parent[position - 1]
                candidate_label[position] = candidate_label[position - 1]
                emitted[position] = emitted[position - 1]
                position -= 1
            candidate_prob[position] = score
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
            previous = previous_rows[place[label, 0], place[label, 1]]
        prefix_probs[node] = candidate_prob[0]
        depths[node] = depths[parent] + 1
        first_frame[node] = num_frames
        for frame in range(num_frames - 1, -1, -1):
            # Where repeats do not merge, a label just emitted restricts the next frame no more than a blank.
            if merges_repeats:
                ends_label[node, frame + 1] = emitted[0, frame]
            else:
                ends_blank[node, frame + 1] = emitted[0, frame]
            if emitted[0, frame] > 0.0:
                first_frame[node] = frame + 1
        count += 1
        num_candidates = 0 if is_chain else num_candidates - 1
        for index in range(num_candidates):
            candidate_prob[index] = candidate_prob[index + 1]
            candidate_parent[index] = candidate_parent[index + 1]
            candidate_label[index] = candidate_label[index + 1]
            emitted[index] = emitted[index + 1]
    return tokens[:count], parents[:count], depths[:count], prefix_probs[:count]
