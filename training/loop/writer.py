"""What a run writes: its checkpoint, which it reads again, and its heads with calibration and model card.

A checkpoint has weights and optimizer moments as safetensors, and progress as JSON.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tqdm import tqdm

from drafters.base import Drafter, save_tensors
from drafters.model_card import CARD_NAME, RECORD_NAME, local_card
from training.config import SAVE_DTYPES, TrainingConfig
from training.data.sequences import Sequences
from training.head_config import HeadConfig
from training.loop.evaluation import (
    NUM_EVALUATED_AT_END,
    Evaluation,
    HeldOut,
    fit_calibration,
    held_out_sequences,
)
from training.loop.start import BEST, STATE, TENSORS, damaged, data_name, previous_checkpoint, read_progress
from training.settings import TrainingError

# FSDP spreads a tensor over the processes. The main process gathers it; every process can read a whole one.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(
    directory: Path,
    heads: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    main: bool = True,
) -> None:
    """Replace the checkpoint in ``directory``. If interrupted, either the old or the new one is complete.

    With FSDP every process has to call this; only the ``main`` process writes.
    """
    weights = get_model_state_dict(heads, options=WHOLE)
    tensors: dict[str, Any] = {f"heads.{name}": value for name, value in weights.items()}
    for number, optimizer in enumerate(optimizers):
        moments: dict[str, Any] = dict(get_optimizer_state_dict(heads, optimizer, options=WHOLE))
        for parameter, named in moments.get("state", {}).items():
            tensors |= {f"optimizer.{number}.{parameter}.{name}": value for name, value in named.items()}
    if not main:
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_tensors({name: value.contiguous() for name, value in tensors.items()}, partial / TENSORS)
    (partial / STATE).write_text(json.dumps(state))
    old = previous_checkpoint(directory)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    directory: Path, heads: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restore heads and optimizers in place, and return the progress that was saved with them.

    A checkpoint fits any number of processes, with FSDP or without.
    """
    try:
        tensors = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise damaged(directory, error) from error
    weights: dict[str, Any] = {
        name.removeprefix("heads."): value for name, value in tensors.items() if name.startswith("heads.")
    }
    expected = {name: value.shape for name, value in heads.state_dict().items()}
    if expected != {name: value.shape for name, value in weights.items()}:
        raise TrainingError(f"--resume: {directory} holds heads of other shapes than the settings ask for")
    set_model_state_dict(heads, weights, options=WHOLE)
    moments: dict[int, dict[str, Any]] = {number: {} for number in range(len(optimizers))}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, number, parameter = name.split(".", 2)
            parameter, _, key = parameter.rpartition(".")
            moments.setdefault(int(number), {}).setdefault(parameter, {})[key] = value
    own: list[dict[str, Any]] = [dict(get_optimizer_state_dict(heads, optimizer)) for optimizer in optimizers]
    if [saved.keys() for saved in moments.values()] != [state["state"].keys() for state in own]:
        raise TrainingError(f"--resume: {directory} was written with another --optimizer")
    for optimizer, state, saved in zip(optimizers, own, moments.values(), strict=True):
        set_optimizer_state_dict(heads, optimizer, state | {"state": saved}, options=WHOLE)
    return read_progress(directory)


# A calibration that is fitted to fewer steps is too noisy to use.
MIN_CALIBRATION_STEPS = 100

# The evaluations of a head during a run: step, loss of the step, and tokens per step (``beta``).
Curve = list[dict[str, float]]


def best_directory(config: TrainingConfig, settings: HeadConfig) -> Path:
    """The directory of the head with the best evaluation. It has the same files as the last head."""
    return config.run_directory / BEST / settings.name


def best_point(curve: Curve) -> dict[str, float]:
    """The evaluation with the most tokens per step; of equal ones, the earliest."""
    return max(curve, key=lambda point: point["beta"])


@dataclass(frozen=True)
class Records:
    """Evaluates all heads of a run on the held-out sequences and writes the best and the last ones.

    started_at: the commit that was checked out when the run began
    curves: the curve of every head, to which evaluations are added
    board: TensorBoard's writer, or None
    """

    config: TrainingConfig
    sequences: Sequences
    started_at: str | None
    curves: list[Curve]
    held_out: HeldOut
    board: Any

    def evaluate(self, heads: list[Drafter], step: int, losses: list[float]) -> None:
        """Evaluate the heads after ``step`` steps, and write those whose evaluation is their best so far."""
        for settings, head, curve, loss in zip(self.config.heads, heads, self.curves, losses, strict=True):
            evaluation = self.held_out.evaluate(head)
            beta = evaluation.tokens_per_step
            curve.append({"step": step, "loss": round(loss, 4), "beta": round(beta, 3)})
            name = f" {settings.name}" if settings.name else ""
            tqdm.write(
                f"train: step {step}{name}: loss {loss:.3f} nats a draft, {beta:.3f} tokens per step on "
                f"{held_out_sequences(evaluation.num_sequences)}"
            )
            if best_point(curve) is curve[-1]:
                self._write(head, settings, best_directory(self.config, settings), curve, evaluation)
            if self.board:
                self.board.add_scalar(f"{settings.name}/loss".lstrip("/"), loss, step)
                self.board.add_scalar(f"{settings.name}/tokens_per_step".lstrip("/"), beta, step)

    def write_last(self, heads: list[Drafter]) -> None:
        """Evaluate the trained heads on the sequences of the last evaluation and write them."""
        for settings, head, curve in zip(self.config.heads, heads, self.curves, strict=True):
            evaluation = self.held_out.evaluate(head, NUM_EVALUATED_AT_END)
            directory = self.config.directory(settings)
            self._write(head, settings, directory, curve, evaluation)
            print(
                f"train: wrote {directory}: {evaluation.tokens_per_step:.3f} tokens per step on "
                f"{held_out_sequences(evaluation.num_sequences)}"
            )
            if evaluation.num_steps < MIN_CALIBRATION_STEPS:
                print(
                    f"train: {directory} has no calibration, because {evaluation.num_steps} held-out steps "
                    f"are too few; {MIN_CALIBRATION_STEPS} are needed, which a larger --holdout gives"
                )
            best = best_point(curve) if curve else None
            if best and best["beta"] > curve[-1]["beta"]:
                print(
                    f"train: the best evaluation was at step {best['step']} ({best['beta']} tokens per step, "
                    f"at the end {curve[-1]['beta']}); that head is in "
                    f"{best_directory(self.config, settings)}, to be used like the last one"
                )

    def _write(
        self, head: Drafter, settings: HeadConfig, directory: Path, curve: Curve, evaluation: Evaluation
    ) -> None:
        """Write a head with its record and card. It is calibrated if its evaluation has enough steps."""
        enough = evaluation.num_steps >= MIN_CALIBRATION_STEPS
        head.calibrate(fit_calibration(np.exp(evaluation.log_probs), evaluation.accepted) if enough else None)
        head.save_pretrained(directory, dtype=getattr(torch, SAVE_DTYPES[self.config.save_precision]))
        record = provenance(self.config, settings, curve, self.sequences, self.started_at)
        record["held_out"] = {
            "tokens_per_step": round(evaluation.tokens_per_step, 3),
            "steps": evaluation.num_steps,
            "sequences": evaluation.num_sequences,
        }
        (directory / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
        (directory / CARD_NAME).write_text(local_card(head.config, record), encoding="utf-8")


def provenance(
    config: TrainingConfig, head: HeadConfig, curve: Curve, sequences: Sequences, started_at: str | None
) -> dict[str, Any]:
    """The contents of ``training.json``. Paths are given by their names only, so that it can be published."""
    names = {"model": config.model_name, "out": config.out.name, "data": [*map(data_name, config.data)]}
    left_out = ("heads", "cache_dir", "device_map", "base_model", "resume", "overwrite", "allow_changed")
    others = {
        name: value
        for name, value in dataclasses.asdict(config).items()
        if name not in names and name not in left_out
    }
    return {
        "settings": names | others,
        "head": head.published(),
        "curve": curve,
        "num_sequences": len(sequences),
        "data_sha256": hashlib.sha256(sequences.tokens.tobytes()).hexdigest(),
        "git_sha": started_at,
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "accelerate")},
    }
