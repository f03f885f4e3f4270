"""Target models by name: a directory of this machine, or a repository of the Hugging Face hub."""

import re
from pathlib import Path
from typing import Any

from drafters.target_models import TargetModelError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG = "config.json"
# What a model needs beside its weights; other files of a repository stay where they are.
FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def is_hub_name(model: Path) -> bool:
    """Whether a value of ``--model`` names a repository of the hub, and no directory of this machine."""
    name = str(model)
    return not model.exists() and HUB_NAME.fullmatch(name) is not None and not Path(model.parts[0]).exists()


def hub_file(model: Path, name: str) -> Path:
    """Download one file of a repository of the hub. Raises TargetModelError."""
    return Path(_downloaded(model, lambda hub: hub.hf_hub_download(str(model), name)))


def local_model(model: Path) -> Path:
    """The directory of a model, downloaded if it is a name of the hub. Raises TargetModelError."""
    if not is_hub_name(model):
        return model
    patterns = [*FILES, *WEIGHTS]
    return Path(_downloaded(model, lambda hub: hub.snapshot_download(str(model), allow_patterns=patterns)))


def _downloaded(model: Path, download: Any) -> str:
    import huggingface_hub

    try:
        path: str = download(huggingface_hub)
    # The hub's client raises errors of several libraries.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetModelError(
            f"{model} is no directory here, and cannot be downloaded from the hub: {reason}"
        ) from error
    return path
