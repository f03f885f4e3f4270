"""The texts on which a target model is measured before its weights are rounded."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from export.errors import ExportError
from export.source import Source


@dataclass(frozen=True)
class Text:
    """flag: the option that names another file; default: the file of the package"""

    flag: str
    default: str


QUALITY = Text("--quality-text", "quality_text.txt")
CALIBRATION = Text("--calibration-text", "calibration_text.txt")


def read_text(text: Text, path: Path | None) -> str:
    """The content of a UTF-8 file; None takes the package's. Raises ExportError that names the flag."""
    try:
        return (path or files("export") / text.default).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{text.flag}: {path} cannot be read as UTF-8 text: {error}") from error


def token_ids(source: Source, text: Text, path: Path | None, max_tokens: int) -> torch.Tensor:
    """The first tokens [1, L] of a text, int64. Raises ExportError if there are fewer than two."""
    ids = source.tokenizer(read_text(text, path), add_special_tokens=True, verbose=False).input_ids
    ids = ids[: min(max_tokens, source.spec.max_position_embeddings)]
    if len(ids) < 2:
        name = path.name if path else text.default
        raise ExportError(f"{text.flag}: {name} must have at least two tokens, got {len(ids)}")
    return torch.tensor([ids])
