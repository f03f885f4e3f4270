"""Which path of a verified tree is accepted."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AcceptedTensors:
    """What a step adds to B sequences; P is the length of the longest path.

    path: [B, P] int64, the accepted nodes, the root first; behind them ``path[i] == i``
    counts: [B] int64, nodes of the path with the root, hence new tokens
    tokens: [B, P] int64, the first ``counts`` are new; the last of them is the model's own
    """

    path: Tensor
    counts: Tensor
    tokens: Tensor


def accept(
    input_ids: Tensor, parents: Tensor, ancestors: Tensor, choices: Tensor, length: int
) -> AcceptedTensors:
    """Accept every node whose ancestors and itself are what the model chose after their parents.

    input_ids, parents, choices: [B, N] int64; ``choices`` are the tokens that the model chose after each node
    ancestors: [B, N, N] bool, as ``export.step.search.TreeTensors`` has them
    length: P, at least the depth of any node and one
    Children of one node have different tokens, so the model chose at most one of them. The accepted nodes are
    therefore one path, and their numbers ascend along it.
    """
    chosen_after_parent = choices.gather(1, parents.clamp(min=0))
    is_root = torch.arange(input_ids.shape[1]) == 0
    agrees = ((parents >= 0) & (chosen_after_parent == input_ids)) | is_root
    disagreements = (ancestors & ~agrees.unsqueeze(1)).long().sum(-1)
    accepted = disagreements == 0  # [B, N]
    counts = accepted.long().sum(-1)
    rank = accepted.long().cumsum(1) - 1
    places = torch.arange(length)
    is_at = accepted.unsqueeze(1) & (rank.unsqueeze(1) == places.view(1, -1, 1))  # [B, P, N]
    nodes = torch.arange(input_ids.shape[1])
    found = torch.where(is_at, nodes, 0).sum(-1)
    on_path = places < counts.unsqueeze(1)
    tokens = torch.where(on_path, choices.gather(1, found), 0)
    return AcceptedTensors(torch.where(on_path, found, places), counts, tokens)
