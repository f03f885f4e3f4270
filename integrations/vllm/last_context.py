"""The context token before each anchor, from which fused frames begin.

vLLM hands a draft model the context of a step without saying where a sequence's part of it ends: of the rows
that a step verified, some were rejected. Every row comes with the slot of its key and value, and a sequence's
last accepted row has the slot of the position before the anchor.
"""

import torch
from torch import Tensor, nn

NO_SLOT = -1


class LastContext(nn.Module):
    """The context rows of a step: rows [C, H], and their slots [C] int64."""

    rows: Tensor
    slots: Tensor

    def __init__(self, capacity: int, hidden_size: int):
        super().__init__()
        self.register_buffer("rows", torch.zeros(capacity, hidden_size), persistent=False)
        self.register_buffer("slots", torch.full((capacity,), NO_SLOT, dtype=torch.int64), persistent=False)

    def store(self, states: Tensor, slots: Tensor) -> None:
        """Keep context rows [A, H] and their slots [A].

        A step may come in two parts, which are slices of one tensor, the later rows first; so rows are kept
        at the places that they have in their tensor.
        """
        start = states.storage_offset() // states.shape[1]
        end = start + states.shape[0]
        self.rows[start:end] = states
        self.slots[start:end] = slots

    def find(self, wanted: Tensor) -> Tensor:
        """The rows [R, H] with these slots [R]; of a slot that no row has, any row.

        Rows of earlier steps stand behind those of this one, so the first row with a slot is the newest.
        """
        found = (self.slots == wanted.unsqueeze(1)).to(torch.uint8).argmax(1)
        return self.rows[found]


def slots_before(positions: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """The slots [R] of the positions before these [R], both int64.

    block_table: [R' >= 1, blocks] integers, the blocks of each sequence; behind its R' sequences the last one
        stands for padding
    """
    before = (positions - 1).clamp(min=0)
    sequence = torch.arange(positions.shape[0], device=positions.device).clamp(max=block_table.shape[0] - 1)
    column = (before // block_size).clamp(max=block_table.shape[1] - 1)
    return block_table[sequence, column].long() * block_size + before % block_size
