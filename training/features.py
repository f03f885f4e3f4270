"""Where a training batch's features come from: the backbone, or a file of what it said before.

The backbone is frozen, so its hidden states for a sequence never change. Reading them from a
memory-mapped bfloat16 file saves its forward pass in every step after the first epoch's worth.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from drafters.features import FeatureTap
from training.batches import Batch
from training.distill import Sequences

ROWS_PER_PASS = 16


class FeatureSource(Protocol):
    """Features [B, S, F*H] of a batch; rows beyond a sequence's end hold anything finite."""

    def __call__(self, batch: Batch) -> Tensor: ...


class LiveFeatures:
    """One forward pass of the backbone for every batch."""

    def __init__(self, model: Any, layer_ids: tuple[int, ...]):
        self._model = model
        self._tap = FeatureTap(model, layer_ids)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        self._model.get_decoder()(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        )
        return self._tap.take()


class CachedFeatures:
    """All sequences' features in one file, [total tokens, F*H] bfloat16, in the sequences' order."""

    def __init__(self, path: Path, sequences: Sequences, feature_size: int, max_length: int):
        self._sequences = sequences
        self._max_length = max_length
        self._path = path
        shape = (int(sequences.offsets[-1]), feature_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._done = path.with_suffix(".done")
        if not self._done.exists():
            path.unlink(missing_ok=True)
        flat = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=torch.bfloat16)
        self._features = flat.view(shape)

    @property
    def complete(self) -> bool:
        """Whether every sequence's features have been written."""
        return self._done.exists()

    def fill(self, live: FeatureSource, device: torch.device) -> None:
        """Run every sequence through the backbone once, in batches of like length."""
        lengths = (self._sequences.offsets[1:] - self._sequences.offsets[:-1]).clip(max=self._max_length)
        order = lengths.argsort(kind="stable")
        with tqdm(total=len(order), desc="reading features", unit="sequence") as bar:
            for start in range(0, len(order), ROWS_PER_PASS):
                rows = order[start : start + ROWS_PER_PASS].tolist()
                batch = Batch.of_rows(self._sequences, rows, self._max_length).to(device)
                features = live(batch).to("cpu", torch.bfloat16)
                for index, row in enumerate(rows):
                    at = int(self._sequences.offsets[row])
                    self._features[at : at + lengths[row]] = features[index, : lengths[row]]
                bar.update(len(rows))
        self._done.touch()

    def __call__(self, batch: Batch) -> Tensor:
        width = batch.input_ids.shape[1]
        gathered = torch.zeros(len(batch.rows), width, self._features.shape[1], dtype=torch.bfloat16)
        for index, row in enumerate(batch.rows):
            at, end = int(self._sequences.offsets[row]), int(self._sequences.offsets[row + 1])
            count = min(end - at, width)
            gathered[index, :count] = self._features[at : at + count]
        gathered = gathered.to(batch.input_ids.device)
        # Outside autocast the head's float32 layers take no bfloat16.
        return gathered if torch.is_autocast_enabled(gathered.device.type) else gathered.float()
