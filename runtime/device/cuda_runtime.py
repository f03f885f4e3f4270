"""The CUDA runtime's Python bindings, and the GPUs that they find."""

import importlib
import re
from typing import Any

from runtime.core.errors import DeviceError, RequestError
from runtime.device.cuda_device import CudaDevice
from runtime.device.cuda_errors import describe_error


def load_cudart() -> Any | None:
    """The CUDA runtime's bindings, if they are installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None


def capability_of_gpu(cudart: Any, index: int = 0) -> str | None:
    """A GPU's compute capability, such as ``sm89``; None without that GPU or a driver."""
    error, count = cudart.cudaGetDeviceCount()
    if error != cudart.cudaError_t.cudaSuccess or index >= count:
        return None
    attributes = cudart.cudaDeviceAttr
    parts = [
        cudart.cudaDeviceGetAttribute(attribute, index)[1]
        for attribute in (
            attributes.cudaDevAttrComputeCapabilityMajor,
            attributes.cudaDevAttrComputeCapabilityMinor,
        )
    ]
    return f"sm{parts[0]}{parts[1]}"


def check_device_name(name: str) -> int:
    """The number of the GPU of a name such as ``cuda:1``. Raises RequestError for another name."""
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not found:
        raise RequestError(f"device: must be cpu, cuda:0, cuda:1 and so on, got {name!r}")
    return int(found[1] or 0)


def open_cuda_device(name: str) -> CudaDevice:
    """The GPU of a name such as ``cuda:0``; ``cuda`` is the first.

    Raises RequestError for another name, and DeviceError where the bindings or that GPU are missing.
    """
    index = check_device_name(name)
    cudart = load_cudart()
    if cudart is None:
        raise DeviceError(
            f"{name}: the CUDA runtime's bindings are not installed; "
            "pip install -c constraints.txt -e '.[tensorrt-rtx]' brings them"
        )
    error, count = cudart.cudaGetDeviceCount()
    if error != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"{name}: this machine has no GPU or no driver: {describe_error(cudart, error)}")
    if index >= count:
        raise DeviceError(f"{name}: this machine has {count} GPUs, which count from cuda:0")
    return CudaDevice(cudart, index)
