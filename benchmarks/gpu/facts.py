"""What the driver says of a GPU, as far as it says it."""

from dataclasses import dataclass
from typing import Any

from runtime.device import cuda
from runtime.device.device import CPU


@dataclass(frozen=True)
class DeviceFacts:
    """bandwidth: bytes a second between the device and its memory at most; None where it is unknown

    bandwidth_source: who says so
    """

    name: str
    is_gpu: bool
    capability: str | None = None
    memory_bytes: int | None = None
    driver: int | None = None
    bandwidth: float | None = None
    bandwidth_source: str = "unknown"


def device_facts(device: str, bandwidth_gb: float | None) -> DeviceFacts:
    """bandwidth_gb: GB/s, in place of what the driver's clock and bus width give."""
    given = {"bandwidth": 1e9 * bandwidth_gb, "bandwidth_source": "--bandwidth"} if bandwidth_gb else {}
    cudart = None if device == CPU else cuda.load_cudart()
    if cudart is None:
        return DeviceFacts(device, is_gpu=device != CPU, **given)  # type: ignore[arg-type]
    index = cuda.check_device_name(device)
    properties = _ask(cudart, "cudaGetDeviceProperties", index)
    name = getattr(properties, "name", device)
    found: dict[str, Any] = {
        "capability": cuda.capability_of_gpu(cudart, index),
        "memory_bytes": getattr(properties, "totalGlobalMem", None),
        "driver": _ask(cudart, "cudaDriverGetVersion"),
    }
    clock = _attribute(cudart, "cudaDevAttrMemoryClockRate", index)
    width = _attribute(cudart, "cudaDevAttrGlobalMemoryBusWidth", index)
    if clock and width:
        # Memory of GPUs moves data twice in a cycle; the clock is in kHz, the width in bits.
        found["bandwidth"] = 2 * 1e3 * clock * width / 8
        found["bandwidth_source"] = f"the driver: {clock / 1e3:g} MHz, {width} bits, twice a cycle"
    name = name.decode() if isinstance(name, bytes) else str(name)
    return DeviceFacts(name, is_gpu=True, **{**found, **given})


def _attribute(cudart: Any, name: str, index: int) -> int | None:
    attribute = getattr(cudart.cudaDeviceAttr, name, None)
    return None if attribute is None else _ask(cudart, "cudaDeviceGetAttribute", attribute, index)


def _ask(cudart: Any, function: str, *arguments: Any) -> Any:
    """What a function of the driver returns; None where these bindings lack it, or it fails."""
    call = getattr(cudart, function, None)
    if call is None:
        return None
    error, *values = call(*arguments)
    return values[0] if error == cudart.cudaError_t.cudaSuccess else None
