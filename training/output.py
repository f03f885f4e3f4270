"""What stands in the output directory when a run begins: nothing is lost unasked.

A run into a directory with a head goes on with ``--resume`` or begins anew with ``--overwrite``. It is
resumed with the settings it began with; how long it runs and what it keeps on disk may change.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from drafters.config import WEIGHTS_NAME
from training.checkpoint_files import find_checkpoint, previous_checkpoint, read_progress
from training.config import TrainingConfig
from training.errors import TrainingError
from training.flags import flag
from training.hashing import file_sha256

CHECKPOINT, LOGS, BEST = "checkpoint", "logs", "best"
# A run may be resumed with others of these: what it learns from each step stays the same.
FREE = (
    "steps",
    "eval_every",
    "save_every",
    "save_precision",
    "cache_features",
    "cache_dir",
    "device_map",
    "distill_batch_size",
    "out",
    "base_model",
    "resume",
    "overwrite",
    "allow_changed",
)
# What runs did before there was a setting for it.
EARLIER = {"model_dtype": "fp32"}


def check_output(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from, None for a run that begins at step 0.

    Raises TrainingError for a directory that holds a head or a checkpoint, unless a flag says what to do.
    """
    if config.resume and config.overwrite:
        raise TrainingError("--resume and --overwrite exclude each other")
    for directory in (config.out, config.run_directory):
        _check_writable(directory)
    if find_checkpoint(config.out / CHECKPOINT) is not None:
        raise TrainingError(
            f"--out: {config.out / CHECKPOINT} is where an earlier release kept a run's checkpoint; move "
            f"checkpoint, logs and cache to {config.run_directory}, or remove them"
        )
    checkpoint = find_checkpoint(config.run_directory / CHECKPOINT)
    finished = [head for head in config.heads if (config.directory(head) / WEIGHTS_NAME).is_file()]
    if config.resume and checkpoint is not None:
        return checkpoint
    if config.resume and finished:
        raise TrainingError(
            f"--resume: {config.directory(finished[0])} holds a finished head and no checkpoint; --overwrite "
            "begins anew"
        )
    if (checkpoint or finished) and not (config.resume or config.overwrite):
        where = config.directory(finished[0]) if finished else config.run_directory
        what = "a finished head" if finished else "the checkpoint of an unfinished head"
        raise TrainingError(
            f"--out: {where} holds {what}; add --resume to go on or --overwrite to begin anew"
        )
    return None


def forget_checkpoint(config: TrainingConfig) -> None:
    """Remove an earlier run's checkpoints, which a later ``--resume`` would take for this run's."""
    last = config.run_directory / CHECKPOINT
    for directory in (last, previous_checkpoint(last), config.run_directory / BEST):
        shutil.rmtree(directory, ignore_errors=True)


def run_settings(config: TrainingConfig, model_hash: str) -> dict[str, Any]:
    """What a run is made of, for its checkpoint: settings, and the contents of model and data by hash."""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in (*FREE, "heads", "model", "data")
    }
    values["model"] = model_hash[:16]
    values["data"] = {
        path.name: file_sha256(path)[:16] if path.is_file() else "of the hub" for path in config.data
    }
    settings: dict[str, Any] = json.loads(json.dumps(values))
    for head in config.heads:
        prefix = f"head {head.name}: " if head.name else ""
        settings |= {prefix + name: value for name, value in head.published().items() if name != "name"}
    return settings


def check_resumed(config: TrainingConfig, checkpoint: Path, settings: dict[str, Any]) -> None:
    """Raises TrainingError for a checkpoint of other settings, naming them; --allow-changed only says so."""
    # Absent from the checkpoints of earlier releases.
    before = read_progress(checkpoint).get("settings")
    if before is None:
        return
    before = EARLIER | before
    changed = [
        f"{_named(name)} was {before.get(name)}, is {settings.get(name)}"
        for name in dict.fromkeys((*before, *settings))
        # What is absent was no setting yet, and is switched off in both.
        if before.get(name) != settings.get(name) and (name in before or settings[name])
    ]
    if changed and not config.allow_changed:
        raise TrainingError(
            f"--resume: {checkpoint} was written with other settings ({'; '.join(changed)}); --allow-changed "
            "goes on nevertheless, --overwrite begins anew"
        )
    if changed:
        print(f"train: resumed with other settings: {'; '.join(changed)}")


def _named(name: str) -> str:
    """Example: "head a: num_frames" -> "head a: --num-frames"."""
    where, colon, setting = name.rpartition(": ")
    return f"{where}{colon}{flag(setting)}"


def _check_writable(directory: Path) -> None:
    """Raises TrainingError for a place that no directory can be made at."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        raise TrainingError(f"--out: {there} is a file; expected a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise TrainingError(f"--out: {there} cannot be written; expected a directory that can")
