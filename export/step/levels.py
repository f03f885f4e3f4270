"""The tree expansion of ``runtime.core.level_expansion`` in tensors of fixed shape, for a device.

A head returns the K best children of every node of a pass. The M best of them by the probability of their
whole path are the frontier, which the next pass expands. The host expands only those that can still have a
child among the best nodes of the tree. Here the frontier always has M nodes, because a device gains nothing
from a smaller pass. The tree is the same: no child scores above its parent, so a node that the host leaves
out has no child in the tree either. Only the last graph depends on the number of nodes of the tree.

A level that is hardly ever reached is computed too. A device cannot end early, as the host does with
``min_level_probability``, because its launches are fixed before the step begins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.tree_search import LEVEL_DISCOUNT, TreeTensors, ancestors_of

# The log-probability of a missing node. It is finite, so that sums and products with it are numbers;
# a path of a hundred such nodes still has one.
MISSING = -1e30


@dataclass(frozen=True)
class Frontier:
    """The M best children of a pass, best first, all [B, M].

    scores: float32, log-probability of the whole path; ``MISSING`` where there is no node
    chosen: int64, which of the pass's W*K children
    parents: int64, which of its W nodes
    tokens: int64; a place without a node has some child's token, since the head reads it too
    """

    scores: Tensor
    chosen: Tensor
    parents: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class Level:
    """The children of one pass, and which nodes it expanded.

    tokens [B, W, K] int64, log_probs [B, W, K] float32: best first
    scores [B, W] float32, chosen [B, W] int64: of the frontier; None for the root
    """

    tokens: Tensor
    log_probs: Tensor
    scores: Tensor | None = None
    chosen: Tensor | None = None


def frontier_of(tokens: Tensor, log_probs: Tensor, scores: Tensor, *, width: int) -> Frontier:
    """The ``width`` best children.

    tokens, log_probs: [B, W, K], int64 and float32; scores [B, W] float32: of their parents
    """
    found, per_node = _child_scores(log_probs, scores.unsqueeze(-1)), log_probs.shape[-1]
    if per_node < width:  # the root alone has too few
        found = torch.cat((found, torch.full((1, width), MISSING).expand(found.shape[0], -1)), dim=1)
    best, chosen = found.topk(width, dim=1)
    if per_node < width:
        chosen = torch.where(best > MISSING / 2, chosen, 0)
    # In float32, since compilers know no division of whole numbers; a half keeps rounding away from the next.
    parents = ((chosen.float() + 0.5) / per_node).floor().long()
    return Frontier(best, chosen, parents, tokens.flatten(1).gather(1, chosen))


def tree_of_levels(levels: list[Level], anchor_ids: Tensor, *, num_nodes: int) -> TreeTensors:
    """The best ``num_nodes`` children of all passes, as a tree.

    levels: the root's first; anchor_ids [B, 1] int64, the roots' tokens
    """
    none = torch.zeros_like(anchor_ids)
    tokens, scores, parents, depths = [], [], [], []
    first = 0  # of the level above's children, among all
    for depth, level in enumerate(levels):
        count, width = level.tokens.shape[1] * level.tokens.shape[2], level.tokens.shape[2]
        above = torch.zeros(1) if level.scores is None else level.scores.unsqueeze(-1)
        tokens.append(level.tokens.flatten(1))
        scores.append(_child_scores(level.log_probs, above))
        if level.chosen is None:
            parents.append(none - 1 + torch.zeros(count, dtype=torch.int64))
        else:
            parents.append((level.chosen + first).unsqueeze(-1).expand(-1, -1, width).flatten(1))
            first += levels[depth - 1].tokens.shape[1] * width
        depths.append(torch.full((count,), depth + 1))
    short = num_nodes - sum(each.shape[0] for each in depths)
    if short > 0:  # the head does not know so many nodes
        filled = torch.zeros(short, dtype=torch.int64)
        tokens.append(none + filled)
        scores.append(none.float() + torch.full((short,), MISSING))
        parents.append(none - 1 + filled)
        depths.append(filled)
    depth_of = torch.cat(depths)
    score = torch.cat(scores, dim=1)
    # A certain child scores as much as its parent. Every level takes a share off, larger than rounding is, so
    # that a kept node never loses its parent.
    order = score - LEVEL_DISCOUNT * depth_of.float() * (1.0 - score)
    place = order.topk(num_nodes, dim=1).indices
    score = score.gather(1, place)
    is_draft = score > MISSING / 2
    above = torch.cat(parents, dim=1).gather(1, place)
    moved = (above.unsqueeze(-1) == place.unsqueeze(1)).float().argmax(-1) + 1  # of [B, children, places]

    def with_root(root: Tensor, drafts: Tensor, other: Tensor | int) -> Tensor:
        return torch.cat((root, torch.where(is_draft, drafts, other)), dim=1)

    parent = with_root(none - 1, torch.where(above >= 0, moved, 0), -1)
    depth_of = (none + depth_of).gather(1, place)
    log_probs = torch.cat((none.float(), torch.where(is_draft, score, -torch.inf)), dim=1)
    return TreeTensors(
        with_root(anchor_ids, torch.cat(tokens, dim=1).gather(1, place), anchor_ids),
        parent,
        with_root(none, depth_of, 0),
        ancestors_of(parent, torch.arange(num_nodes + 1), max_depth=len(levels)),
        log_probs,
    )


def _child_scores(log_probs: Tensor, above: Tensor) -> Tensor:
    """[B, W*K], from [B, W, K] and their parents' [B, W, 1]."""
    # Rounding may leave a certain child a hair above 0, hence above its parent.
    return (above + log_probs.clamp(min=MISSING, max=0.0)).flatten(1)
