"""The state of an interrupted run: weights and AdamW moments as safetensors, progress as JSON."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from training.errors import TrainingError

STATE, TENSORS = "state.json", "state.safetensors"


def save_checkpoint(
    directory: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Replace the checkpoint in ``directory``; an interruption leaves the old or the new one."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {f"drafter.{name}": value for name, value in drafter.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
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
    directory: Path, drafter: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Restore drafter and optimizer in place; returns the progress that was saved with them."""
    directory = find_checkpoint(directory)
    tensors = load_file(directory / TENSORS)
    weights = {n.removeprefix("drafter."): v for n, v in tensors.items() if n.startswith("drafter.")}
    expected = {name: value.shape for name, value in drafter.state_dict().items()}
    if expected != {name: value.shape for name, value in weights.items()}:
        raise TrainingError(f"--resume: {directory} holds a head of another shape than the settings ask for")
    drafter.load_state_dict(weights)
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            moments.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    state: dict[str, Any] = json.loads((directory / STATE).read_text())
    return state
