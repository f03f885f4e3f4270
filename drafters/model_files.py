"""A target model's files: a directory or a GGUF file of this machine, or a repository of the hub.

Whether the files are there and complete is checked before torch or Transformers is imported.
"""

import json
import re
from pathlib import Path
from typing import Any

from drafters.checkpoints.gguf_file import SUFFIX, is_gguf, read_header
from drafters.target_models import TargetModelError, check_model_type

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG = "config.json"
# What a model needs beside its weights; other files of a repository stay where they are.
FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# A file of safetensors begins with the length of its header, in 8 bytes; the header is JSON.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000


class WeightsError(Exception):
    """A file of weights that cannot be read."""


def check_model_files(model: Path) -> None:
    """Check a model's ``config.json`` with its type, and a directory's files; or a GGUF file's header.

    Of a repository of the hub this downloads ``config.json`` alone. Raises TargetModelError in one line.
    """
    if is_hub_name(model):
        check_model_type(_model_type(hub_file(model, CONFIG)))
        return
    if is_gguf(model):
        read_header(model)
        return
    path = model / CONFIG
    if not path.is_file():
        raise TargetModelError(_without_config(model))
    check_model_type(_model_type(path))
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise TargetModelError(
            f"{model} has no tokenizer.json; copy the tokenizer's files of the model into it"
        )
    for weights in sorted(model.glob("*.safetensors")):
        try:
            check_weights(weights)
        except WeightsError as error:
            raise TargetModelError(str(error)) from error


def _model_type(path: Path) -> str:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise TargetModelError(f"{path}: expected an object with the field 'model_type'")
    return str(values["model_type"])


def _without_config(model: Path) -> str:
    expected = "expected a Hugging Face model directory, OWNER/NAME of one on the hub, or a GGUF file"
    ggufs = sorted(model.glob(f"*{SUFFIX}")) if model.is_dir() else []
    if ggufs:
        return f"{model} has no {CONFIG} and holds GGUF files; name one of them, such as {ggufs[0]}"
    if model.suffix == SUFFIX:
        return f"{model} is no file here; expected a GGUF file"
    return f"{model} {'is a file' if model.is_file() else f'has no {CONFIG}'}; {expected}"


def check_weights(path: Path) -> None:
    """Raises WeightsError for a file that is not safetensors or, as a download cut short, not whole."""
    found = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    least = LENGTH_BYTES + length
    if length <= MAX_HEADER_BYTES and found < least:
        raise WeightsError(f"{path} has {found} bytes and must have over {least}; copy it again")
    try:
        header = json.loads(text)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, AttributeError, LookupError):
        raise WeightsError(f"{path} is no safetensors file; copy or download it again") from None
    expected = least + max(ends, default=0)
    if found != expected:
        raise WeightsError(f"{path} has {found} bytes and must have {expected}; copy it again")


def is_hub_name(model: Path) -> bool:
    """Whether a value of ``--model`` names a repository of the hub, and no directory of this machine."""
    name = str(model)
    return not model.exists() and HUB_NAME.fullmatch(name) is not None and not Path(model.parts[0]).exists()


def hub_file(model: Path, name: str) -> Path:
    """Download one file of a repository of the hub. Raises TargetModelError."""
    return Path(_downloaded(model, lambda hub: hub.hf_hub_download(str(model), name)))


def local_model(model: Path) -> Path:
    """The directory or file of a model, downloaded if it is a name of the hub. Raises TargetModelError."""
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
