"""Where the checkpoint of a training run is, and how far the run had come; its tensors are not read."""

import json
from pathlib import Path
from typing import Any

STATE = "state.json"


def find_checkpoint(directory: Path) -> Path | None:
    """Where the last complete checkpoint is; None if there is none."""
    places = (directory, previous_checkpoint(directory))
    return next((found for found in places if (found / STATE).is_file()), None)


def previous_checkpoint(directory: Path) -> Path:
    """Where a checkpoint is while another one takes its place."""
    return directory.with_name(directory.name + ".old")


def read_progress(directory: Path) -> dict[str, Any]:
    """What was saved beside the tensors of a complete checkpoint."""
    progress: dict[str, Any] = json.loads((directory / STATE).read_text())
    return progress
