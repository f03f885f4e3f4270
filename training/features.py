"""The features of a training batch: computed by the target model, or read from a file.

The target model is frozen, so its hidden states for a sequence never change. Reading them from a
memory-mapped bfloat16 file saves its forward pass in every epoch after the first.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from drafters.features import FeatureTap
from training.batches import Batch
from training.distill import Sequences

SEQUENCES_PER_PASS = 16


class FeatureSource(Protocol):
    """Features [B, S, F*H] of a batch; beyond a sequence's end they are finite and mean nothing."""

    def __call__(self, batch: Batch) -> Tensor: ...


def select_layers(features: Tensor, layer_ids: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """features [B, S, F*H] of ``layer_ids`` -> those of the ``wanted`` layers alone."""
    if wanted == layer_ids:
        return features
    parts = features.chunk(len(layer_ids), dim=-1)
    return torch.cat([parts[layer_ids.index(layer)] for layer in wanted], dim=-1)


class SelectedFeatures:
    """The features of some of the layers that another source has."""

    def __init__(self, source: FeatureSource, layer_ids: tuple[int, ...], wanted: tuple[int, ...]):
        self._source = source
        self._layer_ids = layer_ids
        self._wanted = wanted

    def __call__(self, batch: Batch) -> Tensor:
        return select_layers(self._source(batch), self._layer_ids, self._wanted)


class LiveFeatures:
    """One forward pass of the target model for every batch; the features come to the batch's device."""

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
        """Run every sequence through the target model once, in batches of like length."""
        lengths = (self._sequences.offsets[1:] - self._sequences.offsets[:-1]).clip(max=self._max_length)
        order = lengths.argsort(kind="stable")
        with tqdm(total=len(order), desc="reading features", unit="sequence") as bar:
            for start in range(0, len(order), SEQUENCES_PER_PASS):
                indices = order[start : start + SEQUENCES_PER_PASS].tolist()
                batch = Batch.of(self._sequences, indices, self._max_length).to(device)
                features = live(batch).to("cpu", torch.bfloat16)
                for found, index in zip(features, indices, strict=True):
                    at = int(self._sequences.offsets[index])
                    self._features[at : at + lengths[index]] = found[: lengths[index]]
                bar.update(len(indices))
        self._done.touch()

    def __call__(self, batch: Batch) -> Tensor:
        width = batch.input_ids.shape[1]
        gathered = torch.zeros(len(batch.indices), width, self._features.shape[1], dtype=torch.bfloat16)
        for place, index in enumerate(batch.indices):
            at, end = (int(offset) for offset in self._sequences.offsets[index : index + 2])
            count = min(end - at, width)
            gathered[place, :count] = self._features[at : at + count]
        return _as_heads_read(gathered.to(batch.input_ids.device))


def _as_heads_read(features: Tensor) -> Tensor:
    """The features in float32, unless autocast is on: without it, float32 layers refuse bfloat16."""
    return features if torch.is_autocast_enabled(features.device.type) else features.float()
