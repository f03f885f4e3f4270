"""Evaluation on held-out text, and what is written when a run ends."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from drafters.base import Drafter
from drafters.model_card import CARD_NAME, RECORD_NAME, local_card
from training.batches import all_anchors
from training.calibration import fit_calibration
from training.config import SAVE_DTYPES, TrainingConfig
from training.distill import Sequences
from training.evaluate import Evaluation, evaluate
from training.features import FeatureSource, SelectedFeatures
from training.head_config import HeadConfig
from training.output import BEST
from training.provenance import provenance

# Held-out sequences of an evaluation during training, and of the last one. More take longer and make the
# tokens per step more exact.
NUM_EVALUATED, NUM_EVALUATED_AT_END = 32, 256
BATCH_SIZE = 4
# A calibration that is fitted to fewer steps says more about chance than about the head.
MIN_CALIBRATION_STEPS = 100


def held_out_sequences(count: int) -> str:
    """Example: 1 -> "1 held-out sequence"."""
    return f"{count} held-out sequence{'' if count == 1 else 's'}"


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

    @property
    def num_evaluated(self) -> int:
        """Sequences of an evaluation during training, the same every time."""
        return min(NUM_EVALUATED, len(self._indices))

    @property
    def num_evaluated_at_end(self) -> int:
        """Sequences of the last evaluation."""
        return len(self._indices)

    def evaluate(self, head: Drafter, count: int = NUM_EVALUATED) -> Evaluation:
        """Evaluate a head on the first ``count`` sequences."""
        batches = [
            all_anchors(self._sequences, self._indices[start : start + BATCH_SIZE], self._max_length)
            for start in range(0, min(count, len(self._indices)), BATCH_SIZE)
        ]
        source = SelectedFeatures(self._source, self._layer_ids, head.config.target_layer_ids)
        with self._accelerator.autocast():
            return evaluate(source, head, [batch.to(self._accelerator.device) for batch in batches])


def best_directory(config: TrainingConfig, settings: HeadConfig) -> Path:
    """Where the head of the best evaluation is kept, as complete as the last one."""
    return config.run_directory / BEST / settings.name


def best_point(curve: list[dict[str, float]]) -> dict[str, float]:
    """The evaluation with the most tokens per step, the earliest of several."""
    return max(curve, key=lambda point: point["beta"])


@dataclass(frozen=True)
class HeadWriter:
    """Writes heads with their calibration, ``training.json`` and model card.

    started_at: the commit that was checked out when the run began
    """

    config: TrainingConfig
    sequences: Sequences
    started_at: str | None

    def write(
        self,
        head: Drafter,
        settings: HeadConfig,
        directory: Path,
        curve: list[dict[str, float]],
        found: Evaluation,
    ) -> None:
        """Write a head, calibrated on held-out text if there was enough of it.

        curve: the evaluations up to this head; found: one of this head
        """
        enough = found.num_steps >= MIN_CALIBRATION_STEPS
        head.calibrate(fit_calibration(np.exp(found.log_probs), found.accepted) if enough else None)
        head.save_pretrained(directory, dtype=getattr(torch, SAVE_DTYPES[self.config.save_precision]))
        record = provenance(self.config, settings, curve, self.sequences, self.started_at)
        record["held_out"] = {
            "tokens_per_step": round(found.tokens_per_step, 3),
            "steps": found.num_steps,
            "sequences": found.num_sequences,
        }
        (directory / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
        (directory / CARD_NAME).write_text(local_card(head.config, record), encoding="utf-8")


def write_last_head(
    head: Drafter,
    settings: HeadConfig,
    curve: list[dict[str, float]],
    held_out: HeldOut,
    writer: HeadWriter,
) -> None:
    """Evaluate a trained head on all held-out sequences that are used at the end, write it, and say so."""
    found = held_out.evaluate(head, NUM_EVALUATED_AT_END)
    directory, best_head = writer.config.directory(settings), best_directory(writer.config, settings)
    writer.write(head, settings, directory, curve, found)
    print(
        f"train: wrote {directory}: {found.tokens_per_step:.3f} tokens per step on "
        f"{held_out_sequences(found.num_sequences)}"
    )
    if found.num_steps < MIN_CALIBRATION_STEPS:
        print(
            f"train: {directory} has no calibration, because {found.num_steps} held-out steps are too few; "
            f"{MIN_CALIBRATION_STEPS} are needed, which a larger --holdout gives"
        )
    best = best_point(curve) if curve else None
    if best and best["beta"] > curve[-1]["beta"]:
        print(
            f"train: the best evaluation was at step {best['step']} ({best['beta']} tokens per step, at the "
            f"end {curve[-1]['beta']}); that head is in {best_head}, to be used like the last one"
        )
