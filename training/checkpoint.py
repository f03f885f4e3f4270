"""The state of an interrupted run: weights and optimizer moments as safetensors, progress as JSON."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from training.errors import TrainingError

STATE, TENSORS = "state.json", "state.safetensors"


def whole(value: Tensor) -> Tensor:
    """The tensor of which FSDP gives every process a part: gathered, so every process has to ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def part_like(value: Tensor, own: Tensor) -> Tensor:
    """The part of a whole tensor that this process has of its ``own``."""
    if not isinstance(own, DTensor):
        return value
    moved = value.to(own.device)
    return distribute_tensor(moved, own.device_mesh, own.placements, src_data_rank=None)


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
    parts = {f"heads.{name}": value for name, value in heads.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            parts |= {f"optimizer.{number}.{index}.{name}": value for name, value in moments.items()}
    tensors = {}
    for name, value in parts.items():
        gathered = whole(value)
        if main:
            tensors[name] = gathered.cpu().contiguous()
    if not main:
        return
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(tensors, partial / TENSORS)
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
    own = heads.state_dict()
    if {name: value.shape for name, value in own.items()} != {n: v.shape for n, v in weights.items()}:
        raise TrainingError(f"--resume: {directory} holds heads of other shapes than the settings ask for")
    heads.load_state_dict({name: part_like(value, own[name]) for name, value in weights.items()})
    moments: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, number, index, key = name.split(".")
            if int(number) >= len(moments):
                raise TrainingError(f"--resume: {directory} was written with another --optimizer")
            moments[int(number)].setdefault(int(index), {})[key] = value
    for optimizer, found in zip(optimizers, moments, strict=True):
        groups = optimizer.state_dict()["param_groups"]
        if set(found) != {index for group in groups for index in group["params"]}:
            raise TrainingError(f"--resume: {directory} was written with another --optimizer")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for at, named in found.items():
            for key, value in named.items():
                if value.shape == parameters[at].shape:  # not a count of steps
                    named[key] = part_like(value, parameters[at])
        optimizer.load_state_dict({"state": found, "param_groups": groups})
    state: dict[str, Any] = json.loads((directory / STATE).read_text())
    return state
