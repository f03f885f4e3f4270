"""ONNX Runtime, which comes in two packages: one of them has to be installed, and not both.

    from runtime.engines.ort_wheel import ort

``onnxruntime-gpu`` holds all that ``onnxruntime`` does, as a module of the same name. For pip the two have
nothing to do with each other: it writes one over the other, and removes files of both with either.
"""

import logging
from contextlib import suppress
from importlib import metadata
from typing import Any, NoReturn

from runtime.core.errors import RequestError


class MissingLibrary:
    """Stands in for ONNX Runtime, or a part of it, where it cannot be imported.

    Commands that run no graphs of ONNX Runtime work without it, and others end with one line, because the
    error is raised where it is used and not where it is imported.
    """

    def __init__(self, error: ImportError):
        self._error = error

    def __getattr__(self, name: str) -> "MissingLibrary":
        if name.startswith("__"):  # what Python itself asks for
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RequestError."""
        raise RequestError(
            "ONNX Runtime cannot be imported: pip install -c constraints.txt -e '.[cpu]' brings onnxruntime, "
            f"'.[gpu]' onnxruntime-gpu; install one of the two: {self._error}"
        ) from self._error


try:
    import onnxruntime as ort
except ImportError as error:
    ort = MissingLibrary(error)

__all__ = ["check_installed", "ort"]

LOGGER = logging.getLogger(__name__)
WHEELS = ("onnxruntime", "onnxruntime-gpu")


def check_installed() -> None:
    """Raises RequestError where neither package is installed. Without this call the first use raises it."""
    ort.get_available_providers()


def warn_of_two_wheels() -> None:
    """Log a warning where pip believes both packages to be installed."""
    found = []
    for name in WHEELS:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    if len(found) > 1:
        LOGGER.warning(
            "%s are both installed, and have overwritten each other's files; uninstall both, install one",
            " and ".join(found),
        )


warn_of_two_wheels()
