"""Evaluation on held-out text, and what is written when a run ends."""

import json

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from drafters.base import Drafter
from training.batches import all_anchors
from training.calibration import fit_calibration
from training.config import SAVE_DTYPES, TrainingConfig
from training.distill import Sequences
from training.evaluate import Evaluation, evaluate
from training.features import FeatureSource, SelectedFeatures
from training.head_config import HeadConfig
from training.provenance import provenance

# Held-out sequences of an evaluation during training, and of the last one. More take longer and make the
# tokens per step more exact.
NUM_EVALUATED, NUM_EVALUATED_AT_END = 32, 256
BATCH_SIZE = 4


class HeldOut:
    """The sequences kept from training, every position of their continuations an anchor.

    layer_ids: the layers of which ``source`` has the features, all that any head reads
    """

    def __init__(
        self,
        source: FeatureSource,
        layer_ids: tuple[int, ...],
        sequences: Sequences,
        indices: NDArray[np.int64],
        max_length: int,
        accelerator: Accelerator,
    ):
        self._source = source
        self._layer_ids = layer_ids
        self._sequences = sequences
        self._indices = indices[:NUM_EVALUATED_AT_END].tolist()
        self._max_length = max_length
        self._accelerator = accelerator

    def evaluate(self, head: Drafter, count: int = NUM_EVALUATED) -> Evaluation:
        """Evaluate a head on the first ``count`` sequences."""
        batches = [
            all_anchors(self._sequences, self._indices[start : start + BATCH_SIZE], self._max_length)
            for start in range(0, min(count, len(self._indices)), BATCH_SIZE)
        ]
        source = SelectedFeatures(self._source, self._layer_ids, head.config.target_layer_ids)
        with self._accelerator.autocast():
            return evaluate(source, head, [batch.to(self._accelerator.device) for batch in batches])


def write_head(
    head: Drafter,
    settings: HeadConfig,
    config: TrainingConfig,
    curve: list[dict[str, float]],
    sequences: Sequences,
    held_out: HeldOut,
    started_at: str | None,
) -> None:
    """Fit the head's calibration on held-out text and write the head with its provenance."""
    found = held_out.evaluate(head, NUM_EVALUATED_AT_END)
    head.calibrate(fit_calibration(np.exp(found.log_probs), found.accepted) if found.accepted.size else None)
    directory = config.directory(settings)
    head.save_pretrained(directory, dtype=SAVE_DTYPES[config.save_precision])
    origin = provenance(config, settings, curve, sequences, started_at)
    origin["held_out"] = {"tokens_per_step": round(found.tokens_per_step, 3), "steps": found.num_steps}
    (directory / "training.json").write_text(json.dumps(origin, indent=2) + "\n")
    print(f"wrote {directory}: tokens per step {found.tokens_per_step:.3f} on held-out text")
