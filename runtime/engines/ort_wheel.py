"""ONNX Runtime, which two packages bring: one of them has to be installed, and not both.

    from runtime.engines.ort_wheel import ort

``onnxruntime-gpu`` holds all that ``onnxruntime`` does, as a module of the same name. For pip the two have
nothing to do with each other: it writes one over the other, and removes files of both with either.
"""

import logging
from importlib import metadata

try:
    import onnxruntime as ort
except ImportError as error:
    raise ImportError(
        "ONNX Runtime cannot be imported: pip install -c constraints.txt -e '.[cpu]' brings onnxruntime, "
        f"'.[gpu]' onnxruntime-gpu; install one of the two: {error}"
    ) from error

__all__ = ["installed_wheels", "ort"]

LOGGER = logging.getLogger(__name__)
WHEELS = ("onnxruntime", "onnxruntime-gpu")


def installed_wheels() -> list[str]:
    """Those of the two packages that pip believes to be installed, with their versions."""
    found = []
    for name in WHEELS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def warn_of_two_wheels() -> None:
    found = installed_wheels()
    if len(found) > 1:
        LOGGER.warning(
            "%s are both installed, and have overwritten each other's files; uninstall both, install one",
            " and ".join(found),
        )


warn_of_two_wheels()
