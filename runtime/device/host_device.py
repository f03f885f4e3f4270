"""The host as a device: its memory is the host's, and everything is done at once."""

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import DeviceArray

ALIGNMENT = 64


class HostDevice:
    """A ``Device`` for engines that run on the CPU."""

    def __init__(self) -> None:
        # Keeps the memory of all arrays alive.
        self._blocks: list[NDArray[Any]] = []

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        array = DeviceArray(0, tuple(shape), dtype)
        block = np.zeros(array.nbytes + ALIGNMENT, np.uint8)
        self._blocks.append(block)
        return DeviceArray(block.ctypes.data + -block.ctypes.data % ALIGNMENT, array.shape, dtype)

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        return np.zeros(shape, dtype)

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

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def mark(self) -> float:
        return perf_counter()

    def milliseconds(self, first: float, second: float) -> float:
        return 1e3 * (second - first)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self._blocks.clear()
