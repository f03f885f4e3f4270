"""Work of a device that is prepared once and launched step after step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from runtime.device.device import Device, DeviceArray, can_be_captured

# Bytes, of which an array's address has to be a multiple.
ALIGNMENT = 256

Launch = Callable[[], None]
Stage = tuple[str, list[Launch]]


class Program:
    """A sequence of launches in stages, which a device may capture and repeat as one.

    The first run is launched one by one, since engines allocate what they need in their first pass with new
    shapes. Stages of which a launch cannot be recorded are launched one by one for ever.
    """

    def __init__(self, device: Device, stages: Sequence[Stage]):
        self._device = device
        self._stages = stages
        self._replay: Launch | None = None
        self._was_run = False

    def run(self, *, capture: bool) -> None:
        """Put all stages on the stream."""
        if not (capture and self._was_run):
            self._launch_all()
            self._was_run = True
            return
        if self._replay is None:
            self._replay = self._recorded()
        self._replay()

    def run_in_stages(self) -> list[tuple[str, Any]]:
        """The same, launched one by one; returns the event at the end of every stage."""
        events = []
        for stage, launches in self._stages:
            for launch in launches:
                launch()
            events.append((stage, self._device.mark()))
        self._was_run = True
        return events

    def _recorded(self) -> Launch:
        """All stages as one launch, if the device can record them."""
        if all(can_be_captured(launch) for _, launches in self._stages for launch in launches):
            return self._device.capture(self._launch_all)
        return self._launch_all

    def _launch_all(self) -> None:
        for _, launches in self._stages:
            for launch in launches:
                launch()


class BlockPool:
    """Blocks of a device's memory, each with one of the host's of the same size.

    A purpose has one block. Only a larger one is allocated anew, so whoever begins with the largest allocates
    once.
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
    """Arrays in one block of a device's memory, which one copy brings to the host, or from there.

    purpose: all arrays that are packed for the same one share a block of ``pool``
    arrays: by name, those with the widest types first; only their shapes and types matter
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
            # Engines want aligned addresses.
            offset = -(-end // ALIGNMENT) * ALIGNMENT

    def upload(self) -> None:
        """Bring all of them to the device."""
        self._device.upload(self._host, self._block)

    def download(self) -> None:
        """Bring all of them to the host."""
        self._device.download(self._block, self._host)
