"""What a build checks in its first second, before torch is imported: directories and the files in them.

Everything else about a model needs Transformers and is checked when it is loaded (``export.source``).
"""

import json
import re
from pathlib import Path

from drafters.config import CONFIG_NAME, WEIGHTS_NAME
from export.bundle_writer import check_out
from export.errors import ExportError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# A file of safetensors begins with the length of its header, in 8 bytes; the header is JSON.
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_inputs(model: Path, drafter: Path | None, out: Path) -> None:
    """Raises ExportError, which names the flag, for what cannot become a bundle."""
    check_out(out)
    _check_model(model)
    if drafter is not None:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (drafter / name).is_file():
                raise ExportError(
                    f"--drafter: {drafter} has no {name}; expected the directory of a draft head"
                )
        _check_weights("--drafter", drafter / WEIGHTS_NAME)


def _check_model(model: Path) -> None:
    if not (model / "config.json").is_file():
        raise ExportError(f"--model: {_without_config(model)}")
    if not any((model / name).is_file() for name in TOKENIZER_FILES):
        raise ExportError(
            f"--model: {model} has no tokenizer.json; copy the tokenizer's files of the model into it"
        )
    for path in sorted(model.glob("*.safetensors")):
        _check_weights("--model", path)


def _without_config(model: Path) -> str:
    expected = "expected a Hugging Face model directory"
    if model.suffix == ".gguf" or (model.is_dir() and any(model.glob("*.gguf"))):
        return f"{model} is a GGUF model, which cannot be exported; {expected} with safetensors"
    if model.is_file():
        return f"{model} is a file; {expected}"
    if not model.exists() and HUB_NAME.fullmatch(str(model)):
        return (
            f"{model} is no directory here; {expected}. A model of the hub is downloaded with: "
            f"hf download {model} --local-dir {model.name}"
        )
    return f"{model} has no config.json; {expected}"


def _check_weights(flag: str, path: Path) -> None:
    """A download that was cut short has fewer bytes than the header of the file says."""
    found = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    least = LENGTH_BYTES + length
    if length <= MAX_HEADER_BYTES and found < least:
        raise ExportError(f"{flag}: {path} has {found} bytes and must have over {least}; copy it again")
    try:
        header = json.loads(text)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, AttributeError, LookupError):
        raise ExportError(f"{flag}: {path} is no safetensors file; copy or download it again") from None
    expected = least + max(ends, default=0)
    if found != expected:
        raise ExportError(f"{flag}: {path} has {found} bytes and must have {expected}; copy it again")
