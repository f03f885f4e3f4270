"""Which nodes of a tree go on to the upper layers: those that early-exit logits find most probable.

The probability of a node is that of its path: the product, over the tokens after the root, of what the early
exit of the token before gives them (Speculative Streaming, arXiv 2402.11131, section 3.3). A child is at most
as probable as its parent and has a higher number, so the best nodes are a tree with the same root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptNodes:
    """The K nodes of each of B trees that go on.

    nodes: [B, K] int64, their numbers, ascending
    places: [B, N] int64, where a node is among the kept ones; 0 for a node that is not
    """

    nodes: Tensor
    places: Tensor


def keep_nodes(
    exit_logits: Tensor, input_ids: Tensor, parents: Tensor, ancestors: Tensor, kept_places: Tensor
) -> KeptNodes:
    """The best K of N nodes.

    exit_logits: [B, E, V] of the first E nodes, the parents of all others among them
    input_ids, parents: [B, N] int64; the root's parent is -1
    ancestors: [B, N, N] bool, whether row i's node sees node j; padding does not see the root and comes last
    kept_places: [K] int64, 0 to K - 1
    """
    best = exit_logits.amax(-1, keepdim=True)
    # Written out, because engines spend several passes on a log-sum-exp.
    totals = (best + (exit_logits - best).exp().sum(-1, keepdim=True).log()).squeeze(-1)  # [B, E]
    parent = parents.clamp(min=0)
    flat = exit_logits.flatten(1)
    logits = flat.gather(1, parent * exit_logits.shape[-1] + input_ids)
    # Rounding must not make a token more probable than 1, or a child could come before its parent.
    edges = (logits - totals.gather(1, parent)).clamp(max=0)
    edges = torch.where(parents >= 0, edges, 0.0)
    # Sums of equally many numbers in one order: a further number below 0 never makes such a sum larger.
    scores = torch.where(ancestors, edges.unsqueeze(1), 0.0).sum(-1)  # [B, N]
    is_node = ancestors[:, :, 0]
    numbers = torch.arange(input_ids.shape[1], device=input_ids.device)
    mine, other = scores.unsqueeze(2), scores.unsqueeze(1)
    is_better = (other > mine) | ((other == mine) & (numbers.unsqueeze(0) < numbers.unsqueeze(1)))
    is_real, other_is_real = is_node.unsqueeze(2), is_node.unsqueeze(1)
    comes_before = (other_is_real & ~is_real) | ((other_is_real == is_real) & is_better)
    rank = comes_before.long().sum(-1)
    kept = rank < kept_places.shape[0]
    place = kept.long().cumsum(1) - 1
    is_at = kept.unsqueeze(1) & (place.unsqueeze(1) == kept_places.view(1, -1, 1))  # [B, K, N]
    return KeptNodes(torch.where(is_at, numbers, 0).sum(-1), torch.where(kept, place, 0))
