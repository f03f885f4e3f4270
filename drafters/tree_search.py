"""The prefix search of ``runtime.core.prefix_search`` in tensors of fixed shape, for a device.

The graphs of a device's step trace it, and the draft model in SGLang computes it.

The search on the host is exact and expands one prefix after another. This one goes frame by frame, as a CTC
beam search does (Graves, 2006; Hannun et al., arXiv 1408.2873), and keeps the M most probable prefixes.
``benchmarks.experiments.search_graph`` measures how much probability this loses against the exact search.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lattice import LatticeTensors

# A prefix is less probable than its parent, but rounding and ties may hide that. Every level takes this share
# of its score, so that a kept prefix never loses its parent.
LEVEL_DISCOUNT = 1e-5
# Prefixes that are kept beside the root: so many for each node of the tree, and at least so many more.
KEPT_PER_NODE, KEPT_BESIDE = 2, 16


def kept_prefixes(num_nodes: int) -> int:
    """Prefixes with the root that a search for so many drafts keeps.

    ``runtime.core.prefix_search`` has the same, because neither package may import the other.
    """
    return 1 + max(KEPT_PER_NODE * num_nodes, num_nodes + KEPT_BESIDE)


@dataclass(frozen=True)
class TreeTensors:
    """Trees of B sequences, N nodes each with the root, most probable first.

    A node that the lattice has no prefix for has the parent -1, and its token is the root's.

    tokens, parents, depths: [B, N] int64, as in ``runtime.core.token_tree``
    ancestors: [B, N, N] bool, whether node j is i or an ancestor of i
    log_probs: [B, N] float32, log of the prefix probability; minus infinity where there is no prefix
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    log_probs: Tensor


@dataclass
class Prefixes:
    """The M prefixes that are kept, all [B, M]; a place without a prefix has probability 0.

    probability: psi, that the collapsed frames begin with this prefix
    ends_blank, ends_label: that the frames so far collapse to this very prefix, and end so (float32 all)
    token, parent, depth: int64; the parent is a place, -1 for the root
    place: where the last label's row is, among the frames' labels and the anchor behind them
    """

    probability: Tensor
    ends_blank: Tensor
    ends_label: Tensor
    token: Tensor
    parent: Tensor
    depth: Tensor
    place: Tensor


def search(
    lattice: LatticeTensors, anchor_ids: Tensor, *, merges_repeats: bool, num_nodes: int
) -> TreeTensors:
    """The trees of the lattices' best prefixes.

    anchor_ids: [B, 1] int64, the roots' tokens
    merges_repeats: whether a label that repeats the one of the frame before merges with it
    num_nodes: drafts of a tree
    """
    device, num_frames = anchor_ids.device, lattice.frame_tokens.shape[1]
    places = torch.arange(kept_prefixes(num_nodes), device=device)
    prefixes = root_prefixes(anchor_ids, lattice.frame_tokens, places)
    for frame in torch.arange(num_frames, device=device).split(1):
        prefixes = read_frame(prefixes, lattice, frame, places, merges_repeats=merges_repeats)
    nodes = torch.arange(num_nodes + 1, device=device)
    return tree_of(prefixes, anchor_ids, nodes, max_depth=num_frames)


def root_alone(anchor_ids: Tensor) -> TreeTensors:
    """Trees without drafts, for plain decoding."""
    zeros = torch.zeros_like(anchor_ids)
    return TreeTensors(anchor_ids, zeros - 1, zeros, zeros.unsqueeze(-1) == 0, zeros.float())


def root_prefixes(anchor_ids: Tensor, frame_tokens: Tensor, places: Tensor) -> Prefixes:
    """The root, and places without a prefix; anchor_ids [B, 1], frame_tokens [B, T, K], places [M]."""
    zeros = places * torch.zeros_like(anchor_ids)  # [B, M]
    probability = ((zeros + places) == 0).float()
    # No label is the root's, so that its own token may follow it.
    place = zeros + frame_tokens.shape[1] * frame_tokens.shape[2]
    return Prefixes(probability, probability, zeros.float(), zeros - 1, zeros - 1, zeros, place)


def read_frame(
    prefixes: Prefixes, lattice: LatticeTensors, frame: Tensor, places: Tensor, *, merges_repeats: bool
) -> Prefixes:
    """The prefixes after one more frame. frame [1] int64: which one; places [M] int64: 0, 1, ..."""
    of_frame = lattice.frame(frame)
    labels = of_frame.frame_tokens  # [B, 1, K]
    # Without a transition all prefixes have the same: [B, 1, K] and [B, 1].
    by_label, by_blank = of_frame.after(lattice.previous(prefixes.place))
    mass = prefixes.ends_blank + prefixes.ends_label
    emitted = mass.unsqueeze(-1) * by_label  # [B, M, K]
    is_last = prefixes.token.unsqueeze(-1) == labels
    stays = torch.zeros_like(mass)
    if merges_repeats:
        # The last label again is a new one only after a blank.
        stays = torch.where(is_last, by_label, 0.0).sum(-1) * prefixes.ends_label
        emitted = torch.where(is_last, prefixes.ends_blank.unsqueeze(-1) * by_label, emitted)

    # Mass that a prefix emits flows into the child if it is kept already; other emissions make new prefixes.
    parent = prefixes.parent.clamp(min=0).unsqueeze(-1)
    is_child = is_last & (prefixes.parent >= 0).unsqueeze(-1)
    from_parent = emitted.gather(1, parent.expand(-1, -1, emitted.shape[-1]))
    inflow = torch.where(is_child, from_parent, 0.0).sum(-1)
    is_parent = (prefixes.parent.unsqueeze(1) == places.unsqueeze(1)).float()  # [B, M parents, M children]
    is_known = (is_parent @ is_child.float()) > 0.5
    new = torch.where(is_known, 0.0, emitted)
    zeros = torch.zeros_like(new, dtype=torch.int64)
    label_places = frame * labels.shape[-1] + torch.arange(labels.shape[-1], device=labels.device)

    def extended(values: Tensor, of_new: Tensor) -> Tensor:
        return torch.cat((values, of_new.flatten(1)), dim=1)

    candidates = Prefixes(
        extended(prefixes.probability + inflow, new),
        extended(mass * by_blank, new * 0.0),
        extended(stays + inflow, new),
        extended(prefixes.token, zeros + labels),
        extended(prefixes.parent, zeros + places.unsqueeze(1)),
        extended(prefixes.depth, zeros + (prefixes.depth + 1).unsqueeze(-1)),
        extended(prefixes.place, zeros + label_places),
    )
    return _best(candidates, places.shape[0])


def _best(prefixes: Prefixes, count: int) -> Prefixes:
    """The ``count`` best of [B, C] prefixes, best first. Parents are among the first ``count``."""
    discount = 1.0 - LEVEL_DISCOUNT * prefixes.depth.float()
    score = torch.where(prefixes.probability > 0.0, prefixes.probability * discount, -1.0)
    score, chosen = score.topk(count, dim=1)
    is_prefix = score > 0.0
    parent = prefixes.parent.gather(1, chosen)
    # A parent moves to the place at which it was chosen itself.
    moved = (parent.unsqueeze(-1) == chosen.unsqueeze(1)).float().argmax(-1)  # of [B, children, places]

    def mass(values: Tensor) -> Tensor:
        return torch.where(is_prefix, values.gather(1, chosen), 0.0)

    return Prefixes(
        mass(prefixes.probability),
        mass(prefixes.ends_blank),
        mass(prefixes.ends_label),
        prefixes.token.gather(1, chosen),
        torch.where(is_prefix & (parent >= 0), moved, -1),
        prefixes.depth.gather(1, chosen),
        prefixes.place.gather(1, chosen),
    )


def tree_of(prefixes: Prefixes, anchor_ids: Tensor, nodes: Tensor, *, max_depth: int) -> TreeTensors:
    """The best prefixes as a tree. anchor_ids [B, 1]; nodes [N] int64: 0, 1, ..."""
    probability = prefixes.probability.index_select(1, nodes)
    parents = prefixes.parent.index_select(1, nodes)
    is_draft = (probability > 0.0) & (nodes > 0)
    return TreeTensors(
        torch.where(is_draft, prefixes.token.index_select(1, nodes), anchor_ids),
        torch.where(is_draft, parents, -1),
        torch.where(is_draft, prefixes.depth.index_select(1, nodes), 0),
        ancestors_of(parents, nodes, max_depth=max_depth),
        probability.log().clamp(max=0.0),
    )


def ancestors_of(parents: Tensor, nodes: Tensor, *, max_depth: int) -> Tensor:
    """[B, N, N] bool, whether node j is i or an ancestor of i.

    parents [B, N] int64, -1 for none; nodes [N] int64: 0, 1, ...
    """
    # A node reaches its parent; the square of the matrix reaches two steps up, its square four.
    reach = ((parents.unsqueeze(-1) == nodes) | (nodes.unsqueeze(1) == nodes)).float()
    for _ in range(math.ceil(math.log2(max_depth))):
        reach = ((reach @ reach) > 0.5).float()
    return reach > 0.5
