"""Stored weights: in which files they are, and as floats or as codes with scales. No torch is imported."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from drafters.target_models import TargetModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_files(model: Path) -> list[Path]:
    """The files that Transformers reads of a directory; others may lie beside them.

    All files of safetensors where none has a usual name. Raises TargetModelError for a damaged index.
    """
    if (model / WEIGHTS).is_file():
        return [model / WEIGHTS]
    index = model / INDEX
    if not index.is_file():
        return sorted(model.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [model / name for name in sorted(names)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TargetModelError(
            f"{index}: expected an object with the field 'weight_map', of files by weights"
        ) from error


class TensorFiles:
    """The tensors of a directory's weights by name; each is read when it is asked for."""

    def __init__(self, directory: Path):
        self._places: dict[str, Path] = {}
        for path in weight_files(directory):
            with safe_open(path, framework="pt") as file:
                self._places |= dict.fromkeys(file.keys(), path)

    def names(self) -> set[str]:
        return set(self._places)

    def read(self, name: str, rows: int | None = None) -> "Tensor":
        """A tensor, or its first rows. Raises KeyError."""
        with safe_open(self._places[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[:rows]
        return tensor


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K] whose weights are codes times scales, without minima.

    codes: [N, K], int8, int16 or float8_e4m3fn
    scales: [N, K / group] float32; a scale is that of ``group`` consecutive codes of a row
    """

    codes: "Tensor"
    scales: "Tensor"

    def dequantized(self) -> "Tensor":
        """[N, K] float32: the products, rounded once."""
        rows, width = self.codes.shape
        groups = self.codes.float().reshape(rows, self.scales.shape[1], -1)
        return (groups * self.scales.unsqueeze(-1)).reshape(rows, width)


@dataclass(frozen=True)
class StoredTensor:
    """A quantised tensor of a checkpoint.

    kind: how messages name its form, such as Q8_0
    read: its codes, or its weights [N, K] in float32 if they are no codes times scales
    """

    kind: str
    read: "Callable[[], Codes | Tensor]"

    def dequantized(self) -> "Tensor":
        """[N, K] float32."""
        found = self.read()
        return found.dequantized() if isinstance(found, Codes) else found
