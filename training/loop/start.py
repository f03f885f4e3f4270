"""The first seconds of a run: settings, data and directories are checked before torch is imported.

A run never destroys an earlier one unless a flag says so: if OUT holds a head or a checkpoint, ``--resume``
continues and ``--overwrite`` begins anew. A run is resumed with the settings with which it began; only the
length of the run and what it keeps on disk may change.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.config import CONFIG_NAME, WEIGHTS_NAME
from drafters.model_card import CARD_NAME, RECORD_NAME
from drafters.model_files import WeightsError, check_model_files, check_weights
from drafters.target_models import TargetModelError
from runtime.core.bundle import sha256_of
from runtime.core.cli import output_problem
from runtime.core.system import locked_directory
from training.config import TrainingConfig
from training.data.conversations import BadRows, PlainText, Turn, is_dataset_name, read_turns
from training.settings import TrainingError, flag

# The files of a checkpoint: the progress of the run, and the weights and moments.
STATE, TENSORS = "state.json", "state.safetensors"
# Directories in OUT.run.
CHECKPOINT, LOGS, BEST = "checkpoint", "logs", "best"
# The files of a finished head.
HEAD_FILES = {CONFIG_NAME, WEIGHTS_NAME, RECORD_NAME, CARD_NAME}
# A run may be resumed with other values of these settings, because they do not change what a step learns.
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
# What is recorded of the tokenizer, which no flag sets.
TEMPLATE = "the chat template"
# The values of settings that did not exist when earlier checkpoints were written.
EARLIER = {"model_dtype": "fp32"}


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run.

    turns: all prompts of the data
    bad: the rows that were left out
    checkpoint: the checkpoint from which the run continues; None if it begins at step 0
    """

    turns: list[Turn | PlainText]
    bad: BadRows
    checkpoint: Path | None


def read_inputs(config: TrainingConfig) -> RunInputs:
    """Check directories, model and data, and read the data. Raises TrainingError with one line."""
    if config.device_map and (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise TrainingError(
            f"--device-map: one process spreads the model over all devices, and {processes} were started; "
            "start training without accelerate launch or torchrun"
        )
    checkpoint = check_output(config)
    if checkpoint is not None:
        try:
            check_weights(checkpoint / TENSORS)
        except WeightsError as error:
            raise damaged(checkpoint, error) from error
    try:
        check_model_files(config.model)
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    for head in config.heads:
        if head.init_from:
            _check_first_head(head.init_from)
    bad = BadRows(skip=config.skip_bad_rows)
    turns = [turn for path in config.data for turn in read_turns(path, bad)]
    has_answers = any(isinstance(turn, PlainText) or turn.answer is not None for turn in turns)
    if config.labels == "data" and not has_answers:
        raise TrainingError("--labels data: no row of the data holds an answer")
    return RunInputs(turns, bad, checkpoint)


def _check_first_head(directory: Path) -> None:
    """Raises TrainingError for a directory that holds no draft head to start from."""
    weights = directory / WEIGHTS_NAME
    if not weights.is_file():
        raise TrainingError(
            f"--init-from: {directory} holds no {WEIGHTS_NAME}; expected a draft head's directory"
        )
    if "drafter_type" not in _read_config(directory):
        raise TrainingError(
            f"--init-from: {directory / CONFIG_NAME} is no draft head's; expected a draft head's directory"
        )
    try:
        check_weights(weights)
    except WeightsError as error:
        raise TrainingError(f"--init-from: {error}") from error


def check_output(config: TrainingConfig) -> Path | None:
    """The checkpoint to resume from; None if the run begins at step 0.

    Raises TrainingError for a directory that holds a head or a checkpoint, unless a flag says what to do.
    """
    if config.resume and config.overwrite:
        raise TrainingError("--resume and --overwrite exclude each other")
    places = (config.out, config.run_directory, config.cache_directory)
    for name, directory in zip(("--out", "--out", "--cache-dir"), places, strict=True):
        if problem := output_problem(directory):
            raise TrainingError(f"{name}: {problem}")
    if find_checkpoint(config.out / CHECKPOINT) is not None:
        raise TrainingError(
            f"--out: {config.out / CHECKPOINT} is where an earlier release kept a run's checkpoint; move "
            f"checkpoint, logs and cache to {config.run_directory}, or remove them"
        )
    for head in config.heads:
        _check_head_directory(config.directory(head))
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


def _check_head_directory(directory: Path) -> None:
    """Raises TrainingError for a directory with anything but a draft head in it."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    config = _read_config(directory)
    # A head that was not written to its end may lack its configuration.
    if "drafter_type" not in config and (config or names - HEAD_FILES):
        raise TrainingError(f"--out: {directory} is not empty and holds no draft head")


def _read_config(directory: Path) -> dict[str, Any]:
    """The configuration in a directory of a head or a model; empty if there is none that can be read."""
    try:
        config = json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


@contextmanager
def only_run(config: TrainingConfig) -> Iterator[None]:
    """Hold the directory of the run within the block. Raises TrainingError where another run holds it."""
    config.run_directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        # The other processes of a run leave this to the first.
        if int(os.environ.get("RANK", "0")) == 0:
            try:
                held.enter_context(locked_directory(config.run_directory))
            except BlockingIOError:
                raise TrainingError(f"--out: another run trains in {config.run_directory}") from None
        try:
            yield
        finally:
            with suppress(OSError):  # It holds something, as after all but a run that failed at once.
                config.run_directory.rmdir()


def forget_checkpoint(config: TrainingConfig) -> None:
    """Remove the checkpoints of an earlier run, so that ``--resume`` does not continue it, and its curves."""
    last = config.run_directory / CHECKPOINT
    others = (config.run_directory / name for name in (BEST, LOGS))
    for directory in (last, previous_checkpoint(last), *others):
        shutil.rmtree(directory, ignore_errors=True)


def find_checkpoint(directory: Path) -> Path | None:
    """The directory of the last complete checkpoint; None if there is none."""
    places = (directory, previous_checkpoint(directory))
    return next((place for place in places if (place / STATE).is_file()), None)


def previous_checkpoint(directory: Path) -> Path:
    """The directory to which a checkpoint is moved while a new one takes its place."""
    return directory.with_name(directory.name + ".old")


def read_progress(directory: Path) -> dict[str, Any]:
    """The progress that a checkpoint holds beside its tensors. Raises TrainingError if it is damaged."""
    try:
        progress: dict[str, Any] = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise damaged(directory, error) from error
    return progress


def damaged(directory: Path, error: Exception) -> TrainingError:
    """The error for a checkpoint that cannot be read."""
    return TrainingError(f"--resume: {directory} is damaged ({error}); --overwrite begins anew")


def run_settings(config: TrainingConfig, model_hash: str, chat_template: str | None) -> dict[str, Any]:
    """The settings that a checkpoint records, and hashes of the contents of model, data and template."""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in (*FREE, "heads", "model", "data")
    }
    values["model"] = model_hash[:16]
    values[TEMPLATE] = chat_template and hashlib.sha256(chat_template.encode()).hexdigest()[:16]
    # In their order, on which the hold-out and the batches depend.
    values["data"] = [
        [data_name(path), sha256_of(path)[:16] if path.is_file() else "of the hub"] for path in config.data
    ]
    settings: dict[str, Any] = json.loads(json.dumps(values))
    for head in config.heads:
        prefix = f"head {head.name}: " if head.name else ""
        settings |= {prefix + name: value for name, value in head.published().items() if name != "name"}
    return settings


def data_name(path: Path) -> str:
    """The name of a file without its directory, or the whole name of a data set of the hub."""
    return str(path) if is_dataset_name(path) else path.name


def check_resumed(config: TrainingConfig, checkpoint: Path, settings: dict[str, Any]) -> None:
    """Raises TrainingError for a checkpoint of other settings; --allow-changed only prints them."""
    # The checkpoints of earlier releases have no settings.
    before = read_progress(checkpoint).get("settings")
    if before is None:
        return
    before = EARLIER | {TEMPLATE: settings[TEMPLATE]} | before
    if isinstance(before.get("data"), dict):
        before["data"] = [list(entry) for entry in before["data"].items()]
    changed = [
        f"{_named(name)} was {before.get(name)}, is {settings.get(name)}"
        for name in dict.fromkeys((*before, *settings))
        # A setting that the checkpoint lacks did not exist then. It has not changed if it is off now.
        if before.get(name) != settings.get(name) and (name in before or settings[name])
    ]
    # A checkpoint has the weights of its heads by number.
    old, new = _heads(before), _heads(settings)
    if old != new and sorted(old) == sorted(new):
        raise TrainingError(
            f"--resume: {checkpoint} holds the heads {', '.join(old)} in this order, got {', '.join(new)}"
        )
    if changed and not config.allow_changed:
        raise TrainingError(
            f"--resume: {checkpoint} was written with other settings ({'; '.join(changed)}); --allow-changed "
            "goes on nevertheless, --overwrite begins anew"
        )
    if changed:
        print(f"train: resumed with other settings: {'; '.join(changed)}")


def _heads(settings: dict[str, Any]) -> list[str]:
    """The names of the heads in recorded settings, in their order."""
    owners = (name.rpartition(": ")[0] for name in settings if name.startswith("head "))
    return list(dict.fromkeys(owner.removeprefix("head ") for owner in owners))


def _named(name: str) -> str:
    """The name of a setting as a flag. Example: "head a: num_frames" -> "head a: --num-frames"."""
    where, colon, setting = name.rpartition(": ")
    return name if name == TEMPLATE else f"{where}{colon}{flag(setting)}"
