"""What a build checks in its first second, before torch is imported: directories and the files in them.

Everything else about a model needs Transformers and is checked when it is loaded (``export.source``).
"""

from pathlib import Path

from drafters.config import CONFIG_NAME, WEIGHTS_NAME, DrafterConfig, DrafterConfigError
from drafters.model_files import WeightsError, check_model_files, check_weights
from drafters.target_models import TargetModelError
from export.bundle_writer import check_out
from export.errors import ExportError


def check_inputs(model: Path, drafter: Path | None, out: Path, marker: str) -> None:
    """Raises ExportError, which names the flag, for what cannot be built.

    marker: the file by which an earlier result in ``out`` is known
    """
    check_out(out, marker)
    try:
        check_model_files(model)
    except TargetModelError as error:
        raise ExportError(f"--model: {error}") from error
    if drafter is None:
        return
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (drafter / name).is_file():
            raise ExportError(f"--drafter: {drafter} has no {name}; expected the directory of a draft head")
    try:
        DrafterConfig.load(drafter)
        check_weights(drafter / WEIGHTS_NAME)
    except (DrafterConfigError, WeightsError) as error:
        raise ExportError(f"--drafter: {error}") from error
