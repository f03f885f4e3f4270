"""Memory and a stream of the first GPU, by the CUDA runtime's own Python bindings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from export.errors import ExportError


class Device:
    """Buffers by name; ``close`` frees them.

    cudart: ``cuda.bindings.runtime``
    """

    def __init__(self, cudart: Any):
        self._cudart = cudart
        self.stream = self._call("cudaStreamCreate")
        self._buffers: dict[str, tuple[int, int]] = {}

    def upload(self, name: str, array: NDArray[Any]) -> int:
        """Copy an array to the buffer of its name; returns the address."""
        address = self.reserve(name, array.nbytes)
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self.stream)
        # The copy reads the array, which the caller may change or drop afterwards.
        self.synchronize()
        return address

    def download(self, name: str, array: NDArray[Any]) -> None:
        """Fill an array from the buffer of its name."""
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
        address = self._buffers[name][0]
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self.stream)
        self.synchronize()

    def reserve(self, name: str, size: int) -> int:
        """The address of a buffer of at least ``size`` bytes; what it held is lost when it grows."""
        address, existing = self._buffers.get(name, (0, 0))
        # An engine needs an address even for a tensor without elements.
        size = max(size, 1)
        if existing < size:
            if existing:
                self._call("cudaFree", address)
            address = int(self._call("cudaMalloc", size))
            self._buffers[name] = (address, size)
        return address

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def close(self) -> None:
        for address, _ in self._buffers.values():
            self._call("cudaFree", address)
        self._buffers.clear()
        self._call("cudaStreamDestroy", self.stream)

    def _call(self, function: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cudart, function)(*arguments)
        if error != self._cudart.cudaError_t.cudaSuccess:
            raise ExportError(f"{function}: {_describe(self._cudart, error)}")
        return values[0] if values else None


@contextmanager
def open_device(cudart: Any) -> Iterator[Device]:
    """A device whose memory is freed at the end."""
    device = Device(cudart)
    try:
        yield device
    finally:
        device.close()


def capability_of_gpu(cudart: Any) -> str | None:
    """The first GPU's compute capability, such as ``sm89``; None without a GPU or a driver."""
    error, count = cudart.cudaGetDeviceCount()
    if error != cudart.cudaError_t.cudaSuccess or not count:
        return None
    attributes = cudart.cudaDeviceAttr
    parts = [
        cudart.cudaDeviceGetAttribute(attribute, 0)[1]
        for attribute in (
            attributes.cudaDevAttrComputeCapabilityMajor,
            attributes.cudaDevAttrComputeCapabilityMinor,
        )
    ]
    return f"sm{parts[0]}{parts[1]}"


def _describe(cudart: Any, error: Any) -> str:
    text = cudart.cudaGetErrorString(error)[1]
    return text.decode() if isinstance(text, bytes) else str(text)
