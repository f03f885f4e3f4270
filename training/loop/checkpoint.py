"""The checkpoint of a run: weights and optimizer moments as safetensors, progress as JSON."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from training.loop.start import STATE, previous_checkpoint, read_progress
from training.settings import TrainingError

TENSORS = "state.safetensors"
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
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial / TENSORS)
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

    directory: a directory that ``find_checkpoint`` returned
    """
    tensors = load_file(directory / TENSORS)
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
