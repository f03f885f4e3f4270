"""A target model's files: a directory or a GGUF file of this machine, or a repository of the hub.

Whether the files are there and complete is checked before torch or Transformers is imported.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drafters.checkpoints.gguf_file import SUFFIX, digest_tensors, is_gguf, read_header
from drafters.checkpoints.stored import TensorFiles, weight_files
from drafters.config import DrafterConfig, DrafterConfigError
from drafters.target_models import DIGEST_ROWS, TargetModelError, check_model_type, digest_of, weights_digest

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG = "config.json"
# What a model needs beside its weights; other files of a repository stay where they are.
FILES = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
# The same weights in the form of another library, which some repositories hold as well.
FOREIGN = "*consolidated*"
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
        config = _downloaded(model, lambda hub: hub.hf_hub_download(str(model), CONFIG))
        check_model_type(_model_type(Path(config)))
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
    for weights in weight_files(model):
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
    files = sorted(model.iterdir()) if model.is_dir() else []
    ggufs = [path for path in files if path.suffix.lower() == SUFFIX]
    if ggufs:
        return f"{model} has no {CONFIG} and holds GGUF files; name one of them, such as {ggufs[0]}"
    if model.suffix.lower() == SUFFIX:
        return f"{model} is no file here; expected a GGUF file"
    return f"{model} {'is a file' if model.is_file() else f'has no {CONFIG}'}; {expected}"


def check_weights(path: Path) -> None:
    """Raises WeightsError for a file that cannot be read, is no safetensors file, or is not whole."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            text = file.read(length) if length <= MAX_HEADER_BYTES else b""
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
    least = LENGTH_BYTES + length
    if length <= MAX_HEADER_BYTES and found < least:
        raise WeightsError(f"{path} has {found} bytes and must have over {least}; copy it again")
    try:
        header = json.loads(text)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        expected = least + max(ends, default=0)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        raise WeightsError(f"{path} is no safetensors file; copy or download it again") from None
    if found != expected:
        raise WeightsError(f"{path} has {found} bytes and must have {expected}; copy it again")


def is_hub_name(model: Path) -> bool:
    """Whether a value of ``--model`` names a repository of the hub, and no directory of this machine."""
    name = str(model)
    return not model.exists() and HUB_NAME.fullmatch(name) is not None and not Path(model.parts[0]).exists()


def local_model(model: Path) -> Path:
    """The directory or file of a model, downloaded if it is a name of the hub. Raises TargetModelError."""
    if not is_hub_name(model):
        return model
    patterns: dict[str, Any] = {"allow_patterns": [*FILES, *WEIGHTS], "ignore_patterns": FOREIGN}
    return Path(_downloaded(model, lambda hub: hub.snapshot_download(str(model), **patterns)))


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


# The usual names of the two tensors that a digest is made of.
EMBEDDING, NORM = "embed_tokens.weight", "norm.weight"


def check_base_weights(config: DrafterConfig, model: Any) -> None:
    """Raises DrafterConfigError for a target model of other weights than the head was trained for.

    model: in float32, because rounded weights have another digest. A head that records no digest passes.
    """
    if config.base_weights and config.base_weights != weights_digest(model):
        name = f", {config.base_model!r}" if config.base_model else ""
        raise DrafterConfigError(
            f"base_weights must be the target model's {weights_digest(model)}, got {config.base_weights}; "
            f"the head was trained for a model of other weights{name}"
        )


def check_base_name(config: DrafterConfig, name: str) -> None:
    """Raises DrafterConfigError for a target model of another name, if only names tell.

    A head that records a digest passes: the name of a directory may change.
    """
    recorded = config.base_model.rpartition("/")[2]
    if recorded and not config.base_weights and recorded != name.rpartition("/")[2]:
        raise DrafterConfigError(
            f"base_model must be the target model's name {name!r}, got {config.base_model!r}; the head "
            "records no digest of its model's weights"
        )


def stored_weights_digest(model: Path) -> str:
    """``weights_digest`` of a model, computed from a directory's safetensors files or from a GGUF file.

    It does not depend on how the model was loaded. Returns "" if the two tensors cannot be found there by
    their usual names, as in a directory with other kinds of files.
    """
    if is_gguf(model):
        found = digest_tensors(read_header(model), DIGEST_ROWS)
        return digest_of(*found) if found else ""
    try:
        files = TensorFiles(model)
    except (TargetModelError, OSError, SafetensorError):
        return ""
    embeddings = [name for name in files.names() if name.endswith(EMBEDDING)]
    if len(embeddings) != 1:
        return ""
    (embedding,) = embeddings
    norm = embedding.removesuffix(EMBEDDING) + NORM
    if norm not in files.names():
        return ""
    return digest_of(files.read(norm), files.read(embedding, DIGEST_ROWS))
