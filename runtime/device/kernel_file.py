"""Kernels that TensorRT for RTX has compiled, in a file that the next start reads.

The library compiles kernels when a process loads an engine and first runs it in new shapes. Its runtime cache
holds them, and can be written as bytes. The library itself refuses bytes of another version, GPU or driver.
"""

import logging
import re
from pathlib import Path
from typing import Any

from runtime.core.errors import DeviceError
from runtime.core.system import cache_directory, replace_file
from runtime.device.cuda import CudaDevice

LOGGER = logging.getLogger(__name__)
# The variable that names another directory; empty for none.
DIRECTORY_VARIABLE = "CTC_KERNEL_CACHE"


class KernelFile:
    """The file of one version of the library, one kind of GPU and one driver.

    A file that cannot be read or written costs nothing but the time to compile anew, so it is only logged.
    Processes that write at the same time replace each other's file as a whole.
    """

    def __init__(self, path: Path):
        self._path = path
        # What the file is known to hold.
        self._content = b""

    def load(self, cache: Any) -> None:
        """Fill the library's runtime cache; the GPU must be the calling thread's."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            LOGGER.warning("compiled kernels cannot be read from %s: %s", self._path, error.strerror)
            return
        if cache.deserialize(content):
            self._content = content
            LOGGER.info("%d bytes of compiled kernels were read from %s", len(content), self._path)
        else:
            LOGGER.info("the library refuses the compiled kernels of %s, and compiles them anew", self._path)

    def save(self, cache: Any) -> None:
        """Write what the library's runtime cache holds, unless the file holds it already."""
        memory = cache.serialize()
        content = b"" if memory is None else bytes(memory)
        if not content or content == self._content:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, content)
        except OSError as error:
            LOGGER.warning("compiled kernels cannot be written to %s: %s", self._path, error.strerror)
            return
        self._content = content
        LOGGER.info("%d bytes of compiled kernels were written to %s", len(content), self._path)


def kernel_file(trt: Any, device: CudaDevice) -> KernelFile | None:
    """The file for a library and a GPU.

    None where no directory is wanted or a user without a home has none, or where the GPU is not known.

    trt: the library's module
    """
    try:
        directory = cache_directory("kernels", DIRECTORY_VARIABLE)
        if directory is None:
            return None
        parts = (trt.__name__, trt.__version__, device.describe_kind(), f"cuda-{device.driver_version()}")
    except (RuntimeError, DeviceError) as error:
        LOGGER.warning("compiled kernels are not kept: %s", error)
        return None
    name = "-".join(re.sub(r"[^\w.]+", "_", part) for part in parts)
    return KernelFile(directory / f"{name}.bin")
