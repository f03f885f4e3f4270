"""The batches of a run: sequences, the anchors drawn in them, and the target model's features.

A batch depends only on the seed and its number, so a resumed run sees the batches of an uninterrupted one.

An anchor is a position p where a draft starts. There the head knows the features of all tokens before p and
the token at p itself, and predicts the tokens after p. One pass of the head computes many anchors of a
sequence: frames of different anchors share the keys and values of the context, and a block mask keeps them
apart.

The target model is frozen, so its features of a sequence never change. Reading them from a memory-mapped
bfloat16 file saves its forward pass in every epoch after the first.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from drafters.features import FeatureTap
from runtime.core.system import lock
from training.data.sequences import Sequences

# Sequences of one pass of the target model while the cache of features is filled.
SEQUENCES_PER_PASS = 16
# Passes between two notes of how far the cache of features has come. An interruption repeats so many at most.
PASSES_PER_SAVE = 8


@dataclass(frozen=True)
class AnchorBatch:
    """The draft head's inputs and targets for M anchors in each of B sequences of S tokens.

    anchor_ids [B, M], frame_position_ids [B, M*T], attn_mask [B, 1, M*T, S + M*T] bool
    targets [B, M, U], lengths [B, M]: the tokens after each anchor; a length of 0 marks padding
    """

    anchor_ids: Tensor
    frame_position_ids: Tensor
    attn_mask: Tensor
    targets: Tensor
    lengths: Tensor


def draw_anchors(starts: Tensor, ends: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` distinct positions of every sequence, uniform over [start, end); -1 fills up short ones.

    starts, ends: [B] int64. Returns [B, count] int64, on the CPU.
    """
    size = int(ends.max())
    keys = torch.rand(starts.shape[0], size, generator=generator)
    positions = torch.arange(size)
    outside = (positions < starts.unsqueeze(1)) | (positions >= ends.unsqueeze(1))
    keys = keys.masked_fill(outside, 2.0)
    chosen = keys.argsort(dim=1)[:, :count]
    chosen = chosen.masked_fill(keys.gather(1, chosen) > 1.0, -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


@dataclass(frozen=True)
class Batch:
    """The sequences ``indices`` of the data: input_ids [B, S] right-padded, attention_mask [B, S] int64."""

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
    """A batch and its anchors: positions [B, M] int64, -1 for no anchor; ends [B], the sequences' lengths."""

    batch: Batch
    positions: Tensor
    ends: Tensor

    def anchors(self, num_frames: int, num_labels: int) -> AnchorBatch:
        """The inputs and targets of the anchors for a head of ``num_frames`` frames."""
        input_ids, device = self.batch.input_ids, self.batch.input_ids.device
        batch, length = input_ids.shape
        anchors = self.positions.clamp(min=0)
        at = anchors.unsqueeze(-1) + torch.arange(1, num_labels + 1, device=device)  # [B, M, U]
        lengths = (self.ends.unsqueeze(1) - 1 - anchors).clamp(0, num_labels)
        lengths = lengths.masked_fill(self.positions < 0, 0)
        targets = input_ids.gather(1, at.clamp(max=length - 1).flatten(1)).view_as(at)

        frames = torch.arange(num_frames, device=device)
        frame_positions = (anchors.unsqueeze(-1) + frames).flatten(1)  # [B, M*T]
        owner = torch.arange(anchors.shape[1], device=device).repeat_interleave(num_frames)
        context = torch.arange(length, device=device)
        # A frame sees the context before its anchor, and the frames of the same anchor.
        sees_context = context < anchors.repeat_interleave(num_frames, dim=1).unsqueeze(-1)
        sees_frames = (owner.unsqueeze(1) == owner).expand(batch, -1, -1)
        mask = torch.cat((sees_context, sees_frames), dim=-1).unsqueeze(1)
        return AnchorBatch(input_ids.gather(1, anchors), frame_positions, mask, targets, lengths)

    def to(self, device: torch.device) -> "SampledBatch":
        return SampledBatch(self.batch.to(device), self.positions.to(device), self.ends.to(device))


@dataclass
class BatchSampler:
    """Batches of the sequences ``indices``, with anchors drawn in their continuations."""

    sequences: Sequences
    indices: NDArray[np.int64]
    _: KW_ONLY
    batch_size: int
    num_anchors: int
    max_length: int
    seed: int
    _epoch: int = -1
    _order: NDArray[np.int64] = field(init=False)

    def batch(self, number: int) -> SampledBatch:
        """The batch with this number; numbers are counted over the whole run."""
        indices = [self._index(number * self.batch_size + i) for i in range(self.batch_size)]
        return self.collate(indices, torch.Generator().manual_seed(self.seed * 1_000_003 + number))

    def collate(self, indices: list[int], generator: torch.Generator) -> SampledBatch:
        """A batch of the sequences ``indices``."""
        batch = Batch.of(self.sequences, indices, self.max_length)
        ends = batch.attention_mask.sum(1)
        # A decoding step starts at a token of the continuation, and at least one more token follows.
        starts = torch.from_numpy(self.sequences.prompt_lengths[indices]).clamp(max=ends - 1)
        positions = draw_anchors(starts, (ends - 1).clamp(min=1), self.num_anchors, generator)
        return SampledBatch(batch, positions, ends)

    def _index(self, position: int) -> int:
        """The sequence at a position of the run; every epoch has its own order."""
        epoch, offset = divmod(position, self.indices.size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
        return int(self._order[offset])


def num_held_out(num_sequences: int, share: float) -> int:
    """The number of sequences that are kept from training: at least one, and not all."""
    return max(1, min(round(share * num_sequences), num_sequences - 1))


def split_holdout(
    sequences: Sequences, share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices for training and for validation, which have no sequence in common.

    Sequences without a continuation are left out, and of training those that repeat one of validation, unless
    all do.
    """
    lengths = np.diff(sequences.offsets)
    usable = np.flatnonzero(lengths - sequences.prompt_lengths >= 2)
    order = np.random.default_rng(seed).permutation(usable)
    count = num_held_out(order.size, share)
    held_out = {sequences[index].tobytes() for index in order[:count]}
    repeats = np.array([sequences[index].tobytes() in held_out for index in order[count:]], np.bool_)
    return order[count:] if repeats.all() else order[count:][~repeats], order[:count]


def all_anchors(sequences: Sequences, indices: list[int], max_length: int) -> SampledBatch:
    """A batch whose anchors are all positions where a decoder may start a step, in order."""
    batch = Batch.of(sequences, indices, max_length)
    ends = batch.attention_mask.sum(1)
    starts = torch.from_numpy(sequences.prompt_lengths[indices]).clamp(max=ends - 1)
    counts = (ends - 1 - starts).clamp(min=0)
    steps = torch.arange(max(1, int(counts.max())))
    positions = (starts.unsqueeze(1) + steps).masked_fill(steps >= counts.unsqueeze(1), -1)
    return SampledBatch(batch, positions, ends)


# Computes the features [B, S, F*H] of a batch. After a sequence, they are finite but meaningless.
FeatureSource = Callable[[Batch], Tensor]


def select_layers(features: Tensor, layer_ids: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """features [B, S, F*H] of ``layer_ids`` -> the features of the ``wanted`` layers."""
    if wanted == layer_ids:
        return features
    parts = features.chunk(len(layer_ids), dim=-1)
    return torch.cat([parts[layer_ids.index(layer)] for layer in wanted], dim=-1)


class LiveFeatures:
    """Features from one forward pass of the target model, on the batch's device."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...]):
        self._model = model
        self._tap = FeatureTap(model, layer_ids)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        self._model.get_decoder()(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        )
        return _as_heads_read(self._tap.take().to(batch.input_ids.device))


class CachedFeatures:
    """The features of all sequences in one file, [total tokens, F*H] bfloat16, in the sequences' order.

    A file that is not complete is locked until ``fill`` ends, so that one run fills it and others wait.
    """

    def __init__(self, path: Path, sequences: Sequences, feature_size: int, max_length: int):
        self._sequences = sequences
        self._max_length = max_length
        self._path = path
        shape = (int(sequences.offsets[-1]), feature_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._done = path.with_suffix(".done")
        # How many sequences an interrupted run has written, in the order of ``fill``.
        self._progress = path.with_suffix(".progress")
        self._lock = ExitStack()
        if not (self.complete and path.exists() and path.stat().st_size):
            self._prepare(2 * shape[0] * shape[1])
        flat = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=torch.bfloat16)
        self._features = flat.view(shape)

    def _prepare(self, num_bytes: int) -> None:
        """Lock the file and take its space on the disk, unless another run completes it meanwhile."""
        with ExitStack() as opened:
            stream = opened.enter_context(self._path.open("ab"))
            try:
                lock(stream.fileno(), wait=False)
            except BlockingIOError:
                print(f"train: waiting for another run, which fills {self._path}", flush=True)
                lock(stream.fileno(), wait=True)
            if not self._path.stat().st_size:
                # What is known of a file that is gone says nothing of the new one.
                for note in (self._done, self._progress):
                    note.unlink(missing_ok=True)
            elif not (self._done.exists() or self._progress.exists()):
                stream.truncate(0)
            if not self.complete:
                _reserve(stream, num_bytes)
                self._lock = opened.pop_all()

    @property
    def complete(self) -> bool:
        """Whether every sequence's features have been written."""
        return self._done.exists()

    def fill(self, live: FeatureSource, device: torch.device) -> None:
        """Run every sequence through the target model once, in batches of similar length.

        An interrupted run goes on behind the batches of which it knows that they are on disk.
        """
        lengths = (self._sequences.offsets[1:] - self._sequences.offsets[:-1]).clip(max=self._max_length)
        order = lengths.argsort(kind="stable")
        written = int(self._progress.read_text()) if self._progress.exists() else 0
        bar = tqdm(total=len(order), initial=written, desc="reading features", unit="sequence")
        with self._lock, bar:
            for start in range(written, len(order), SEQUENCES_PER_PASS):
                indices = order[start : start + SEQUENCES_PER_PASS].tolist()
                batch = Batch.of(self._sequences, indices, self._max_length).to(device)
                features = live(batch).to("cpu", torch.bfloat16)
                for values, index in zip(features, indices, strict=True):
                    at = int(self._sequences.offsets[index])
                    self._features[at : at + lengths[index]] = values[: lengths[index]]
                bar.update(len(indices))
                if start // SEQUENCES_PER_PASS % PASSES_PER_SAVE == PASSES_PER_SAVE - 1:
                    self._save_progress(start + len(indices))
            self._done.touch()
            self._progress.unlink(missing_ok=True)

    def _save_progress(self, count: int) -> None:
        """Note that ``count`` sequences are on disk."""
        with self._path.open("rb") as stream:
            os.fsync(stream.fileno())  # writes the pages of the memory map, too
        partial = self._progress.with_suffix(".partial")
        partial.write_text(str(count))
        partial.replace(self._progress)

    def __call__(self, batch: Batch) -> Tensor:
        width = batch.input_ids.shape[1]
        gathered = torch.zeros(len(batch.indices), width, self._features.shape[1], dtype=torch.bfloat16)
        for place, index in enumerate(batch.indices):
            at, end = (int(offset) for offset in self._sequences.offsets[index : index + 2])
            count = min(end - at, width)
            gathered[place, :count] = self._features[at : at + count]
        return _as_heads_read(gathered.to(batch.input_ids.device))


def _reserve(stream: BinaryIO, num_bytes: int) -> None:
    """Take a file's space on the disk. A memory map that finds the disk full later would end the process."""
    reserve = getattr(os, "posix_fallocate", None)  # macOS has none.
    try:
        if reserve is not None:
            reserve(stream.fileno(), 0, num_bytes)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), stream.name) from error


def _as_heads_read(features: Tensor) -> Tensor:
    """The features in float32, unless autocast is on. Without autocast, float32 layers refuse bfloat16."""
    return features if torch.is_autocast_enabled(features.device.type) else features.float()
