"""Which files of a directory hold a model's weights. No torch is imported."""

import json
from pathlib import Path

from drafters.target_models import TargetModelError

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
