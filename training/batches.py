"""Which sequences and anchors each step sees: a pure function of the seed and the step.

Nothing is carried from step to step, so a resumed run sees exactly what an uninterrupted one would.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.anchors import AnchorBatch, draw_anchors, make_anchor_batch
from training.distill import Sequences


@dataclass(frozen=True)
class Batch:
    """input_ids [B, S] right-padded, attention_mask [B, S], and the anchors in them."""

    input_ids: Tensor
    attention_mask: Tensor
    anchors: AnchorBatch


class BatchSampler:
    """Batches of sequences with anchors drawn in their continuations."""

    def __init__(
        self,
        sequences: Sequences,
        indices: NDArray[np.int64],
        *,
        batch_size: int,
        num_anchors: int,
        num_frames: int,
        num_labels: int,
        max_length: int,
        seed: int,
    ):
        self.sequences = sequences
        self.indices = indices
        self.batch_size = batch_size
        self.num_anchors = num_anchors
        self.num_frames = num_frames
        self.num_labels = num_labels
        self.max_length = max_length
        self.seed = seed

    def batch(self, number: int) -> Batch:
        """The batch with this number, counted over the whole run."""
        rows = [self._row(number * self.batch_size + i) for i in range(self.batch_size)]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        return self.collate(rows, generator)

    def collate(self, rows: list[int], generator: torch.Generator) -> Batch:
        """A batch of given sequences."""
        tokens = [self.sequences[row][: self.max_length] for row in rows]
        ends = torch.tensor([len(row) for row in tokens])
        input_ids = torch.zeros(len(rows), int(ends.max()), dtype=torch.long)
        for index, row in enumerate(tokens):
            input_ids[index, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask = (torch.arange(input_ids.shape[1]) < ends.unsqueeze(1)).long()
        # A decoding step starts at a token the backbone wrote and has at least one more to predict.
        starts = torch.from_numpy(self.sequences.prompt_lengths[rows]).clamp(max=ends - 1)
        positions = draw_anchors(starts, (ends - 1).clamp(min=1), self.num_anchors, generator)
        anchors = make_anchor_batch(
            input_ids, ends, positions, num_frames=self.num_frames, num_labels=self.num_labels
        )
        return Batch(input_ids, mask, anchors)

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self.indices.size)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.indices.size)
        return int(self.indices[order[offset]])


def split_holdout(
    sequences: Sequences, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices for training and for validation; sequences without a continuation are left out."""
    lengths = np.diff(sequences.offsets)
    usable = np.flatnonzero(lengths - sequences.prompt_lengths >= 2)
    order = np.random.default_rng(seed).permutation(usable)
    count = max(1, round(share * order.size))
    return order[count:], order[:count]
