"""The sequences and anchors of every step: a function of the seed and the step alone.

Nothing is carried from step to step, so a resumed run sees what an uninterrupted one would.
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
    """The data's sequences ``indices``: input_ids [B, S] right-padded, attention_mask [B, S] int64."""

    indices: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor

    @classmethod
    def of(cls, sequences: Sequences, indices: list[int], max_length: int) -> "Batch":
        """The given sequences, each cut to ``max_length`` tokens."""
        tokens = [torch.from_numpy(sequences[index][:max_length].astype(np.int64)) for index in indices]
        ends = torch.tensor([len(sequence) for sequence in tokens])
        input_ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = (torch.arange(input_ids.shape[1]) < ends.unsqueeze(1)).long()
        return cls(tuple(indices), input_ids, mask)

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.indices, self.input_ids.to(device), self.attention_mask.to(device))


@dataclass(frozen=True)
class SampledBatch:
    """A batch and the anchors drawn in it: positions [B, M] int64, -1 for none; ends [B]: the lengths."""

    batch: Batch
    positions: Tensor
    ends: Tensor

    def anchors(self, num_frames: int, num_labels: int) -> AnchorBatch:
        """The anchors as a head of ``num_frames`` frames needs them."""
        return make_anchor_batch(
            self.batch.input_ids, self.ends, self.positions, num_frames=num_frames, num_labels=num_labels
        )

    def to(self, device: torch.device) -> "SampledBatch":
        return SampledBatch(self.batch.to(device), self.positions.to(device), self.ends.to(device))


class BatchSampler:
    """Batches of sequences with anchors drawn in their continuations."""

    def __init__(
        self,
        sequences: Sequences,
        indices: NDArray[np.int64],
        *,
        batch_size: int,
        num_anchors: int,
        max_length: int,
        seed: int,
    ):
        self.sequences = sequences
        self.indices = indices
        self.batch_size = batch_size
        self.num_anchors = num_anchors
        self.max_length = max_length
        self.seed = seed
        self._epoch, self._order = -1, indices

    def batch(self, number: int) -> SampledBatch:
        """The batch with this number, counted over the whole run."""
        indices = [self._index(number * self.batch_size + i) for i in range(self.batch_size)]
        return self.collate(indices, torch.Generator().manual_seed(self.seed * 1_000_003 + number))

    def collate(self, indices: list[int], generator: torch.Generator) -> SampledBatch:
        """A batch of given sequences."""
        batch = Batch.of(self.sequences, indices, self.max_length)
        ends = batch.attention_mask.sum(1)
        # A decoding step starts at a token of the continuation and has at least one more to predict.
        starts = torch.from_numpy(self.sequences.prompt_lengths[indices]).clamp(max=ends - 1)
        positions = draw_anchors(starts, (ends - 1).clamp(min=1), self.num_anchors, generator)
        return SampledBatch(batch, positions, ends)

    def _index(self, position: int) -> int:
        """The sequence at a position of the run; every epoch has an order of its own."""
        epoch, offset = divmod(position, self.indices.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
        return int(self._order[offset])


def num_held_out(num_sequences: int, share: float) -> int:
    """How many sequences are kept from training: at least one."""
    return max(1, round(share * num_sequences))


def split_holdout(
    sequences: Sequences, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices for training and for validation; sequences without a continuation are left out."""
    lengths = np.diff(sequences.offsets)
    usable = np.flatnonzero(lengths - sequences.prompt_lengths >= 2)
    order = np.random.default_rng(seed).permutation(usable)
    count = num_held_out(order.size, share)
    return order[count:], order[:count]


def all_anchors(sequences: Sequences, indices: list[int], max_length: int) -> SampledBatch:
    """Every position of the continuations as an anchor, in order: where a decoder may start a step."""
    batch = Batch.of(sequences, indices, max_length)
    ends = batch.attention_mask.sum(1)
    starts = torch.from_numpy(sequences.prompt_lengths[indices]).clamp(max=ends - 1)
    counts = (ends - 1 - starts).clamp(min=0)
    steps = torch.arange(max(1, int(counts.max())))
    positions = (starts.unsqueeze(1) + steps).masked_fill(steps >= counts.unsqueeze(1), -1)
    return SampledBatch(batch, positions, ends)
