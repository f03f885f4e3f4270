"""A device as the graph step sees it: memory, one stream, and engines that run on both.

A device works on its stream in the order of the calls. A call returns at once, and its effect on memory is
visible after ``synchronize``. Devices are ``HostDevice``, and ``CudaDevice`` and ``TorchDevice`` elsewhere.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError, DeviceMemoryError

# The name of the host as a device; a GPU's is ``cuda:0``.
CPU = "cpu"
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}
# Alignment in bytes of the arrays that share a block: TensorRT demands it of every address.
ALIGNMENT = 256
# Alignment in bytes of the host's arrays: a line of the processor's cache.
HOST_ALIGNMENT = 64

Launch = Callable[[], None]


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array in a device's memory.

    dtype: as in a graph's contract, such as ``float16``
    """

    address: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def rows(self, start: int, stop: int) -> "DeviceArray":
        """The rows from ``start`` to ``stop`` of the first axis."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"an array of {self.shape} has no rows {start}:{stop}")
        offset = start * math.prod(self.shape[1:]) * ITEM_SIZES[self.dtype]
        return DeviceArray(self.address + offset, (stop - start, *self.shape[1:]), self.dtype)

    def view(self, shape: Sequence[int]) -> "DeviceArray":
        """The beginning of the same memory in another shape."""
        result = DeviceArray(self.address, tuple(shape), self.dtype)
        if result.nbytes > self.nbytes:
            raise ValueError(f"a view of {self.shape} cannot have the larger shape {result.shape}")
        return result


class Device(Protocol):
    """Methods put work on the stream and return, but for ``allocate``, ``host_array``, ``milliseconds``,
    ``synchronize`` and ``close``.

    All raise DeviceError with the driver's reason. A device that has failed stays unusable.
    """

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """An array of zeros, whose memory is freed by ``close``."""

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Zeros in host memory that the device can reach (pinned), for uploads and downloads."""

    def upload(self, source: NDArray[Any], target: DeviceArray) -> None:
        """Copy from the host; the source must not change before ``synchronize``."""

    def download(self, source: DeviceArray, target: NDArray[Any]) -> None:
        """Copy to the host; the target must not be read before ``synchronize``."""

    def clear(self, array: DeviceArray) -> None:
        """Set an array to zeros."""

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        """Copy all bytes of the source within the device; the two arrays must not overlap."""

    def copy_blocks(
        self, source: DeviceArray, target: DeviceArray, *, count: int, size: int, pitch: int
    ) -> None:
        """Copy ``count`` blocks of ``size`` bytes; in both arrays a block begins every ``pitch`` bytes."""

    def capture(self, work: Launch) -> Launch:
        """Record what ``work`` puts on the stream, without doing it; the result launches all of it at once.

        If a device cannot record, the result calls ``work``.
        """

    def mark(self) -> Any:
        """An event at the end of the work that is on the stream now."""

    def milliseconds(self, first: Any, second: Any) -> float:
        """Time between two events; valid after ``synchronize``."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def close(self) -> None:
        """Wait, and free all memory. A second call does nothing."""


class Gpu(Protocol):
    """What a device that is a GPU has beside the methods of ``Device``.

    index: which GPU, in the driver's order; stream: its stream, as libraries expect it
    """

    is_gpu: bool
    index: int

    @property
    def stream(self) -> int: ...

    def select(self) -> None:
        """Make this the calling thread's GPU, which has to precede every call of a library with ``stream``.

        Raises DeviceError if the device has failed.
        """

    def fail(self, reason: str) -> DeviceError:
        """Mark the device as unusable, and return the error to raise."""

    def at_close(self, release: Callable[[], Any]) -> None:
        """``close`` calls ``release`` when no work uses anything any more, the last one given first."""

    def prepared(self) -> None:
        """All passes of requests have run once: what libraries have compiled for them can be kept."""

    def free_memory(self) -> tuple[int, int]:
        """Free bytes of the GPU's memory, and all bytes."""


def as_gpu(device: Any) -> Gpu | None:
    """The device itself if it is a GPU."""
    return device if getattr(device, "is_gpu", False) else None


class DeviceEngine(Protocol):
    """A graph that a device runs.

    ``arrays`` names an array for every input and output of the graph's contract, in the shapes of one pass.
    A cache is updated in place: ``present_*`` has the address of ``past_*``.
    """

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        """Prepare passes with these arrays; each call of the result puts one pass on the device's stream.

        Raises DeviceError for shapes that the engine does not accept.
        """

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        """Put a single pass on the stream and keep nothing of it. It must not be captured."""


# Makes the engine of a graph, by the graph's name.
MakeEngine = Callable[[str], DeviceEngine]
# Opens a device for a bundle's graphs: ``cpu`` or a GPU such as ``cuda:0``, or None for what the target runs
# on; with the number of threads of a CPU. Also returns what makes the engine of a graph, by its name. Raises
# RequestError for a device that the target does not run on, and DeviceError for one that is missing.
OpenDevice = Callable[[Bundle, str | None, int | None], tuple[Device, MakeEngine]]


def can_be_captured(launch: Launch) -> bool:
    """Whether a device can record a launch, which has a method of this name to ask if it cannot always."""
    ask = getattr(launch, "can_be_captured", None)
    return ask is None or bool(ask())


def write_array(device: Device, array: DeviceArray, values: NDArray[Any]) -> None:
    """Upload all of an array, and wait for the copy."""
    values = np.ascontiguousarray(values)
    if values.nbytes != array.nbytes:
        raise ValueError(f"{values.nbytes} bytes do not fill an array of {array.nbytes}")
    device.upload(values, array)
    device.synchronize()


class BlockPool:
    """Blocks of a device's memory, one for each purpose, each with a block of host memory of the same size.

    A block is allocated again only if a larger one is needed, so taking the largest first allocates once.
    """

    def __init__(self, device: Device):
        self._device = device
        self._blocks: dict[str, tuple[DeviceArray, NDArray[Any]]] = {}

    def take(self, purpose: str, size: int) -> tuple[DeviceArray, NDArray[Any]]:
        """The block of a purpose, cut to ``size`` bytes."""
        if purpose not in self._blocks or self._blocks[purpose][0].nbytes < size:
            found = self._device.allocate((size,), "bool"), self._device.host_array((size,), "bool")
            self._blocks[purpose] = found
        on_device, on_host = self._blocks[purpose]
        return on_device.rows(0, size), on_host[:size]


class PackedArrays:
    """Arrays in one block of a device's memory, which a single copy brings to the host or to the device.

    purpose: arrays that are packed for the same purpose share a block of ``pool``
    arrays: shapes and types by name, the widest types first; their addresses are ignored
    """

    def __init__(self, device: Device, pool: BlockPool, purpose: str, arrays: Mapping[str, DeviceArray]):
        self._device = device
        size = sum(array.nbytes + ALIGNMENT for array in arrays.values())
        self._block, self._host = pool.take(purpose, size)
        self.on_device: dict[str, DeviceArray] = {}
        self.on_host: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, array in arrays.items():
            end = offset + array.nbytes
            self.on_device[name] = replace(array, address=self._block.address + offset)
            self.on_host[name] = self._host[offset:end].view(array.dtype).reshape(array.shape)
            offset = -(-end // ALIGNMENT) * ALIGNMENT

    def upload(self) -> None:
        """Copy all of them to the device."""
        self._device.upload(self._host, self._block)

    def download(self) -> None:
        """Copy all of them to the host."""
        self._device.download(self._block, self._host)


class HostDevice:
    """The host as a ``Device``, for engines on the CPU: every call does its work before it returns."""

    def __init__(self) -> None:
        # Keeps the memory of all arrays alive.
        self._blocks: list[NDArray[Any]] = []

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        array = DeviceArray(0, tuple(shape), dtype)
        block = self.host_array((array.nbytes + HOST_ALIGNMENT,), "uint8")
        self._blocks.append(block)
        return DeviceArray(block.ctypes.data + -block.ctypes.data % HOST_ALIGNMENT, array.shape, dtype)

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        try:
            return np.zeros(shape, dtype)
        except MemoryError as error:
            raise DeviceMemoryError(
                f"{CPU}: {error}; smaller max_length, max_num_seqs or max_nodes need less"
            ) from error

    def upload(self, source: NDArray[Any], target: DeviceArray) -> None:
        ctypes.memmove(target.address, source.ctypes.data, source.nbytes)

    def download(self, source: DeviceArray, target: NDArray[Any]) -> None:
        ctypes.memmove(target.ctypes.data, source.address, source.nbytes)

    def clear(self, array: DeviceArray) -> None:
        ctypes.memset(array.address, 0, array.nbytes)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        ctypes.memmove(target.address, source.address, source.nbytes)

    def copy_blocks(
        self, source: DeviceArray, target: DeviceArray, *, count: int, size: int, pitch: int
    ) -> None:
        for offset in range(0, count * pitch, pitch):
            ctypes.memmove(target.address + offset, source.address + offset, size)

    def capture(self, work: Launch) -> Launch:
        return work

    def mark(self) -> float:
        return perf_counter()

    def milliseconds(self, first: float, second: float) -> float:
        return 1e3 * (second - first)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self._blocks.clear()
