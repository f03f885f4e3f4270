"""The chain of a lattice in tensors of fixed shape, for engines that verify drafts in a row.

It equals ``chain_search`` of ``runtime.core.prefix_search``, whose words it uses, but nothing depends on
data: ``torch.export`` traces it, and a CUDA graph can capture it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.lattice import LatticeTensors

# Stands for a probability of 0 where its logarithm is needed: twelve frames of it do not overflow.
LEAST_KEPT = 1e-26


def chain_search(lattice: LatticeTensors, *, merges_repeats: bool, num_drafts: int) -> tuple[Tensor, Tensor]:
    """The chains of at most N drafts of R lattices.

    merges_repeats: whether a label that repeats the one of the frame before merges with it
    Returns the tokens [R, N] int64 and the number of drafts [R] int64. Behind its drafts a chain repeats the
    last one; the tokens of a chain without drafts mean nothing.
    """
    tokens = lattice.frame_tokens.flatten(1)  # [R, T * K]
    same = (tokens.unsqueeze(1) == tokens.unsqueeze(2)).float()
    # Nothing is emitted yet, and the root's place is behind all labels'.
    emitted = torch.zeros_like(lattice.frame_logprobs[..., 0])
    starts = torch.ones_like(emitted[:, :1])
    place = torch.full_like(tokens[:, :1], tokens.shape[1])
    token = torch.full_like(tokens[:, :1], -1)
    length = torch.zeros_like(tokens[:, 0])
    chain = []
    for _ in range(num_drafts):
        labels, blank = lattice.after(lattice.previous(place))
        is_last = lattice.frame_tokens == token.unsqueeze(-1)
        repeated = torch.where(is_last, labels, 0.0).sum(-1) if merges_repeats else torch.zeros_like(blank)
        # Of having emitted the prefix before a frame and ended in its label, and in a blank: [R, T] each.
        ends_label = _carried(F.pad(emitted, (1, 0)), repeated)[:, :-1]
        ends_blank = _carried(torch.cat((starts, ends_label * blank), dim=1), blank)[:, :-1]
        emissions = labels * (ends_blank + ends_label).unsqueeze(-1)  # [R, T, K]
        if merges_repeats:
            emissions = torch.where(is_last, labels * ends_blank.unsqueeze(-1), emissions)
        # Of every place the prefix probability of its label as the next draft, in all frames together.
        scores = (same @ emissions.flatten(1).unsqueeze(-1)).squeeze(-1)
        best, chosen = scores.max(dim=1, keepdim=True)
        is_draft = best > 0.0
        place = torch.where(is_draft, chosen, place)
        token = torch.where(is_draft, tokens.gather(1, chosen), token)
        emitted = torch.where(lattice.frame_tokens == token.unsqueeze(-1), emissions, 0.0).sum(-1)
        emitted = torch.where(is_draft, emitted, 0.0)
        starts = torch.zeros_like(starts)
        length = length + is_draft.squeeze(1).long()
        chain.append(token)
    return torch.cat(chain, dim=1), length


def _carried(entered: Tensor, kept: Tensor) -> Tensor:
    """y_0 = entered_0, y_t = entered_t + kept_{t-1} y_{t-1}: entered [R, T + 1], kept [R, T] -> [R, T + 1].

    As one product with the matrix of all that is kept from one place to another.
    """
    total = F.pad(kept.clamp(min=LEAST_KEPT).log().cumsum(-1), (1, 0))
    change = total.unsqueeze(2) - total.unsqueeze(1)
    index = torch.arange(total.shape[1], device=total.device)
    decay = torch.where(index.unsqueeze(1) >= index, change, -torch.inf).exp()
    return (decay @ entered.unsqueeze(-1)).squeeze(-1)
