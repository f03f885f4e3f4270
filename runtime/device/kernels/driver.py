"""The compiled kernels on a GPU, by the CUDA driver's Python bindings.

The package has a file for each compute capability, and one that a driver compiles for others.
"""

import ctypes
import gzip
import importlib
import logging
import re
from pathlib import Path
from typing import Any

from runtime.core.errors import DeviceError
from runtime.device.device import Gpu
from runtime.device.kernels.arguments import KERNELS, KernelLaunch

# All kernels as one source, and where the compiled files are.
SOURCE = Path(__file__).with_name("source") / "step.cu"
IMAGES = Path(__file__).with_name("images")
# Compute capabilities that have machine code, and the least one that the intermediate code is for.
CAPABILITIES = ("80", "86", "89", "90", "100", "120")
LEAST_CAPABILITY = "75"


def image_name(capability: str) -> str:
    """The file for GPUs of a capability such as ``sm89``.

    Machine code runs on GPUs of the same major number and the same or a larger minor number. Where there is
    none, the driver compiles the intermediate code, which needs a driver of CUDA 12.9 or later.
    """
    found = re.fullmatch(r"sm(\d+)(\d)", capability)
    assert found
    major, minor = int(found[1]), int(found[2])
    fitting = [each for each in CAPABILITIES if int(each[:-1]) == major and int(each[-1]) <= minor]
    return f"step.sm_{fitting[-1]}.cubin.gz" if fitting else f"step.compute_{LEAST_CAPABILITY}.ptx.gz"


def read_image(capability: str) -> bytes:
    """The compiled kernels for a GPU of this capability."""
    return gzip.decompress((IMAGES / image_name(capability)).read_bytes())


LOGGER = logging.getLogger(__name__)


class CudaKernels:
    """A ``Launcher`` that puts kernels on the stream of a GPU, which can capture them.

    driver: ``cuda.bindings.driver``
    Raises DeviceError if the driver refuses the compiled kernels.
    """

    def __init__(self, driver: Any, device: Gpu):
        self._driver = driver
        self._device = device
        device.select()
        gpu = self._call("cuDeviceGet", device.index)
        # The context in which the CUDA runtime works, and torch with it.
        self._context = self._call("cuDevicePrimaryCtxRetain", gpu)
        device.at_close(lambda: driver.cuDevicePrimaryCtxRelease(gpu))
        self._select()
        attributes = driver.CUdevice_attribute
        major, minor, shared_bytes = (
            int(self._call("cuDeviceGetAttribute", attribute, gpu))
            for attribute in (
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )
        module = self._call("cuModuleLoadData", read_image(f"sm{major}{minor}"))
        device.at_close(lambda: driver.cuModuleUnload(module))
        self._functions = {name: self._call("cuModuleGetFunction", module, name.encode()) for name in KERNELS}
        attributes = driver.CUfunction_attribute
        # On some GPUs the system keeps a part for every kernel.
        self.max_shared_bytes = shared_bytes - max(
            int(self._call("cuFuncGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
            for function in self._functions.values()
        )
        for function in self._functions.values():
            # Without this a block gets 48 KiB at most.
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, limit, self.max_shared_bytes)

    def launch(self, launch: KernelLaunch) -> None:
        self._select()
        # The driver copies the arguments before it returns.
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(launch.arguments))
        (error,) = self._driver.cuLaunchKernel(
            self._functions[launch.kernel],
            *launch.grid,
            *(launch.threads, 1, 1),
            launch.shared_bytes,
            self._device.stream,
            ctypes.addressof(parameters),
            0,
        )
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise self._device.fail(f"{launch.kernel}: cuLaunchKernel: {self._describe(error)}")

    def _select(self) -> None:
        """Make the device the calling thread's, for the driver too."""
        self._device.select()
        # torch leaves a thread as it is whose GPU is the right one, as the first is at the beginning, and the
        # driver refuses to work in a thread without a context.
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._driver, function)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{function}: {self._describe(error)}")
        return values[0] if values else None

    def _describe(self, error: Any) -> str:
        text = self._driver.cuGetErrorString(error)[1]
        return text.decode() if isinstance(text, bytes) else str(error)


def load_driver() -> Any | None:
    """The CUDA driver's bindings, if they are installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def load_kernels(device: Gpu) -> CudaKernels | None:
    """The kernels on a GPU; None, and a line in the log, where its driver cannot load them."""
    driver = load_driver()
    if driver is None:
        return None
    try:
        return CudaKernels(driver, device)
    except DeviceError as error:
        LOGGER.warning("steps run as graphs, since the driver does not load their kernels: %s", error)
        return None
