"""Where a head came from: the contents of ``training.json``."""

import dataclasses
import hashlib
import importlib.metadata
import subprocess
from pathlib import Path
from typing import Any

from training.config import TrainingConfig
from training.distill import Sequences
from training.head_config import HeadConfig


def provenance(
    config: TrainingConfig,
    head: HeadConfig,
    curve: list[dict[str, float]],
    sequences: Sequences,
    started_at: str | None,
) -> dict[str, Any]:
    """The contents of ``training.json``; paths only by name, so that it can be published.

    started_at: the commit that was checked out when the run began
    """
    settings = dataclasses.asdict(config)
    for name in ("heads", "cache_dir", "device_map", "base_model", "resume", "overwrite", "allow_changed"):
        del settings[name]
    settings |= {"model": config.model_name, "data": [p.name for p in config.data], "out": config.out.name}
    return {
        "settings": settings,
        "head": head.published(),
        "curve": curve,
        "num_sequences": len(sequences),
        "data_sha256": hashlib.sha256(sequences.tokens.tobytes()).hexdigest(),
        "git_sha": started_at,
        "versions": {n: importlib.metadata.version(n) for n in ("torch", "transformers", "accelerate")},
    }


def git_sha() -> str | None:
    """The commit that is checked out, None outside a repository."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return done.stdout.strip() or None
