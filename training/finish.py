"""Held-out text: how good the heads are on it, and what is written when a run ends."""

import json

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray

from drafters.base import Drafter
from training.batches import SampledBatch, all_anchors
from training.calibration import fit_calibration
from training.config import SAVE_DTYPES, TrainingConfig
from training.distill import Sequences
from training.evaluate import Evaluation, evaluate
from training.features import FeatureSource
from training.head_config import HeadConfig
from training.provenance import provenance

# Held-out sequences that one estimate during training looks at; at its end all are used, up to MOST.
NUM_EVALUATED, MOST = 32, 256
ROWS = 4


class HeldOut:
    """The sequences kept from training, every position of their continuations an anchor."""

    def __init__(
        self,
        source: FeatureSource,
        sequences: Sequences,
        rows: NDArray[np.int64],
        max_length: int,
        accelerator: Accelerator,
    ):
        self._source = source
        self._sequences = sequences
        self._rows = rows[:MOST]
        self._max_length = max_length
        self._accelerator = accelerator

    def evaluate(self, head: Drafter, count: int = NUM_EVALUATED) -> Evaluation:
        """Tokens per step on the first ``count`` sequences."""
        rows = self._rows[:count].tolist()
        groups = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        batches = [self._batch(group) for group in groups]
        with self._accelerator.autocast():
            return evaluate(self._source, head, batches)

    def _batch(self, rows: list[int]) -> SampledBatch:
        sampled = all_anchors(self._sequences, rows, self._max_length)
        return sampled.to(self._accelerator.device)


def write_head(
    head: Drafter,
    settings: HeadConfig,
    config: TrainingConfig,
    curve: list[dict[str, float]],
    sequences: Sequences,
    held_out: HeldOut,
    started_at: str | None,
) -> None:
    """Calibrate the head's probabilities on all held-out text and write it with its provenance."""
    found = held_out.evaluate(head, MOST)
    head.calibrate(fit_calibration(np.exp(found.log_probs), found.accepted) if found.accepted.size else None)
    directory = config.directory(settings)
    head.save_pretrained(directory, dtype=SAVE_DTYPES[config.save_precision])
    origin = provenance(config, settings, curve, sequences, started_at)
    origin["held_out"] = {"tokens_per_step": round(found.tokens_per_step, 3), "steps": found.num_steps}
    (directory / "training.json").write_text(json.dumps(origin, indent=2) + "\n")
    print(f"wrote {directory}: tokens per step {found.tokens_per_step:.3f} on held-out text")
