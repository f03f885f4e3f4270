"""NVIDIA's two compilers behind one set of calls: TensorRT for RTX, and TensorRT.

TensorRT for RTX compiles ahead of time for the GPUs that are named, on a machine with or without a GPU.
TensorRT compiles for the GPU it runs on. Both libraries are imported only here, and only when asked for.
"""

import functools
import re
from dataclasses import dataclass
from typing import Any

from export.errors import ExportError
from runtime.core.errors import BundleError
from runtime.device.tensorrt import import_tensorrt_module

RTX, TENSORRT = "tensorrt-rtx", "tensorrt"
# The least compute capability on which a type is computed with.
LEAST_CAPABILITY = {"bf16": 80, "fp8": 89}


@dataclass(frozen=True)
class Library:
    """An imported compiler.

    trt: the Python module
    log: what it has to say; one logger serves the whole process, because TensorRT ignores a second one
    """

    target: str
    trt: Any
    log: Any

    @property
    def name(self) -> str:
        return f"{self.target} {self.trt.__version__}"

    @property
    def compiles_ahead(self) -> bool:
        """Whether it compiles for GPUs that are named, in place of the one it runs on."""
        return self.target == RTX

    def capabilities(self) -> tuple[str, ...]:
        """The GPUs that may be named, such as ``sm89``."""
        if not self.compiles_ahead:
            return ()
        names = self.trt.ComputeCapability.__members__
        return tuple(sorted((n.lower() for n in names if re.fullmatch(r"SM\d+", n)), key=capability_number))


def capability_number(capability: str) -> int:
    """89 for ``sm89``."""
    return int(capability.removeprefix("sm"))


@functools.cache
def load_library(target: str) -> Library:
    """Import the compiler of a target. Raises ExportError, which names the extra to install."""
    try:
        trt = import_tensorrt_module(target)
    except BundleError as error:
        raise ExportError(f"--{error}") from error
    return Library(target, trt, _make_log(trt))


def check_capabilities(library: Library, capabilities: tuple[str, ...], precisions: tuple[str, ...]) -> None:
    """Raises ExportError for a GPU that the library does not know or that lacks a precision."""
    if not library.compiles_ahead:
        if capabilities:
            raise ExportError(f"--gpu: {library.target} compiles for the GPU it runs on, got --gpu")
        return
    known = library.capabilities()
    if not capabilities:
        raise ExportError(f"--gpu: {library.target} needs the GPUs to compile for, of {', '.join(known)}")
    for capability in capabilities:
        if capability not in known:
            raise ExportError(
                f"--gpu: {library.name} compiles for {', '.join(known)}, got {capability!r}; the data-centre "
                "GPUs of sm90 and sm100 need --target tensorrt on that GPU"
            )
        for precision in precisions:
            least = LEAST_CAPABILITY.get(precision, 0)
            if capability_number(capability) < least:
                raise ExportError(f"--gpu: {precision} needs sm{least} or later, got {capability}")


def _make_log(trt: Any) -> Any:
    class Log(trt.ILogger):
        """Keeps the errors, and the memory that the builder reports."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.activation_bytes = 0

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            found = re.match(r"Total Activation Memory: (\d+) bytes", message)
            if found:
                self.activation_bytes = int(found[1])

        def clear(self) -> None:
            self.errors, self.activation_bytes = [], 0

    return Log()
