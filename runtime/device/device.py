"""What the graph step asks of a device: memory, one stream, and graphs that run on both.

A device does everything on its stream, in the order in which it was told. A call returns at once; what it
does to the device's memory, or to the host's, is there after ``synchronize``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True)
class DeviceArray:
    """An array in a device's memory, without gaps.

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
    """Every method but ``allocate``, ``host_array`` and ``close`` only puts work on the stream.

    All raise DeviceError with the driver's reason. A failed device stays unusable; another one can be made.
    """

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Memory of zeros, which lives as long as the device."""
        ...

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Zeros in host memory that the device can reach (pinned), for uploads and downloads."""
        ...

    def upload(self, source: NDArray[Any], target: DeviceArray) -> None:
        """Copy from the host; the source must not change before ``synchronize``."""
        ...

    def download(self, source: DeviceArray, target: NDArray[Any]) -> None:
        """Copy to the host; the target must not be read before ``synchronize``."""
        ...

    def clear(self, array: DeviceArray) -> None:
        """Make all of an array zeros."""
        ...

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        """Copy as many bytes as the source has, within the device; the two must not overlap."""
        ...

    def copy_blocks(
        self, source: DeviceArray, target: DeviceArray, *, count: int, size: int, pitch: int
    ) -> None:
        """Copy ``count`` blocks of ``size`` bytes, whose beginnings are ``pitch`` bytes apart in both."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what ``work`` puts on the stream, without doing it; the result does all of it in one launch.

        Where a device cannot record, the result calls ``work``.
        """
        ...

    def mark(self) -> Any:
        """An event that happens when the work so far is done."""
        ...

    def milliseconds(self, first: Any, second: Any) -> float:
        """Time between two events; valid after ``synchronize``."""
        ...

    def synchronize(self) -> None:
        """Wait until all work is done."""
        ...

    def close(self) -> None:
        """Wait, and free all memory."""
        ...


class DeviceEngine(Protocol):
    """A graph that a device runs.

    ``arrays`` names an array for every input and output of the graph's contract, in the shapes of one pass.
    A cache is updated in place: ``present_*`` has the address of ``past_*``.
    """

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        """Prepare passes with these arrays; the result puts one pass on the device's stream.

        Raises DeviceError for shapes that the engine does not take.
        """
        ...

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        """Put a single pass on the stream, with nothing kept of it. Not to be captured."""
        ...


def can_be_captured(launch: Callable[[], None]) -> bool:
    """Whether a device can record what an engine's ``bind`` returned, or any other work.

    All work can be recorded of which nothing else is known. An engine that knows better returns an object
    with a method ``can_be_captured``, which is asked before a capture begins.
    """
    ask = getattr(launch, "can_be_captured", None)
    return ask is None or bool(ask())


def write_array(device: Device, array: DeviceArray, values: NDArray[Any]) -> None:
    """Upload all of an array, and wait until the host's values have been read."""
    values = np.ascontiguousarray(values)
    if values.nbytes != array.nbytes:
        raise ValueError(f"{values.nbytes} bytes do not fill an array of {array.nbytes}")
    device.upload(values, array)
    device.synchronize()
