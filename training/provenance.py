"""Where a head came from: the contents of ``training.json``."""

import dataclasses
import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from training.config import TrainingConfig
from training.distill import Sequences


def provenance(config: TrainingConfig, state: dict[str, Any], sequences: Sequences) -> dict[str, Any]:
    """What ``training.json`` keeps; paths only by name, so that it can be published."""
    settings = dataclasses.asdict(config)
    settings |= {"model": config.model.name, "data": [p.name for p in config.data], "out": config.out.name}
    settings["cache_dir"] = None
    return {
        "settings": settings,
        "steps": state["step"],
        "curve": state["curve"],
        "num_sequences": len(sequences),
        "data_sha256": hashlib.sha256(sequences.tokens.tobytes()).hexdigest(),
        "git_sha": _git_sha(),
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "accelerate")},
    }


def _git_sha() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None
