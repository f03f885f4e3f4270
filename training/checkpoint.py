"""The state of an interrupted run: weights and optimizer moments as safetensors, progress as JSON."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from training.errors import TrainingError

STATE, TENSORS = "state.json", "state.safetensors"


# Whole tensors, wherever FSDP has spread them; in the main process alone where they are gathered.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(
    directory: Path,
    heads: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    main: bool = True,
) -> None:
    """Replace the checkpoint in ``directory``; an interruption leaves the old or the new one.

    Under FSDP every process has to call it; only the ``main`` one writes.
    """
    tensors = {f"heads.{name}": value for name, value in get_model_state_dict(heads, options=WHOLE).items()}
    for number, optimizer in enumerate(optimizers):
        moments = get_optimizer_state_dict(heads, optimizer, options=WHOLE)
        for parameter, named in moments.get("state", {}).items():
            tensors |= {f"optimizer.{number}.{parameter}.{name}": value for name, value in named.items()}
    if not main:
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, partial / TENSORS)
    (partial / STATE).write_text(json.dumps(state))
    old = _previous(directory)
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(directory: Path) -> Path:
    """Where the last complete checkpoint is; raises TrainingError if there is none."""
    for found in (directory, _previous(directory)):
        if (found / STATE).is_file():
            return found
    raise TrainingError(f"--resume: {directory} holds no checkpoint")


def _previous(directory: Path) -> Path:
    return directory.with_name(directory.name + ".old")


def load_checkpoint(
    directory: Path, heads: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """Restore heads and optimizers in place; returns the progress that was saved with them.

    A checkpoint fits any number of processes, with FSDP or without.
    """
    directory = find_checkpoint(directory)
    tensors = load_file(directory / TENSORS)
    weights = {n.removeprefix("heads."): v for n, v in tensors.items() if n.startswith("heads.")}
    shapes = {name: value.shape for name, value in heads.state_dict().items()}
    if shapes != {name: value.shape for name, value in weights.items()}:
        raise TrainingError(f"--resume: {directory} holds heads of other shapes than the settings ask for")
    set_model_state_dict(heads, weights, options=WHOLE)
    moments: list[dict[str, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, number, rest = name.split(".", 2)
            parameter, _, key = rest.rpartition(".")
            if int(number) >= len(moments):
                raise TrainingError(f"--resume: {directory} was written with another --optimizer")
            moments[int(number)].setdefault(parameter, {})[key] = value
    for optimizer, found in zip(optimizers, moments, strict=True):
        own = get_optimizer_state_dict(heads, optimizer)
        if found.keys() != own["state"].keys():
            raise TrainingError(f"--resume: {directory} was written with another --optimizer")
        set_optimizer_state_dict(heads, optimizer, own | {"state": found}, options=WHOLE)
    state: dict[str, Any] = json.loads((directory / STATE).read_text())
    return state
