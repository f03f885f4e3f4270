"""An engine of the reference whose passes are repeated by the same engine of a device, and compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.verify.comparison import compare
from export.verify.device_passes import DevicePasses, decoded, encoded
from runtime.device.device import Device, DeviceArray, DeviceEngine

# Passes that are compared of a graph in the same shapes.
PASSES = 4


@dataclass
class Found:
    """The comparison of one graph: passes and their shapes, the largest difference, and problems."""

    passes: int = 0
    shapes: set[tuple[Any, ...]] = field(default_factory=set)
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)


class ComparedEngine:
    """The reference's engine, with a pass of the device's after each of its first passes in new shapes."""

    def __init__(
        self,
        graph: str,
        host: Device,
        engine: DeviceEngine,
        passes: DevicePasses,
        found: Found,
        tolerance: float,
    ):
        self._graph, self._host, self._engine, self._passes = graph, host, engine, passes
        self._found, self._tolerance = found, tolerance
        self._counts: dict[tuple[Any, ...], int] = {}

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        return partial(self._pass, dict(arrays), self._engine.bind(arrays))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        self._pass(arrays, partial(self._engine.run, arrays))

    def _pass(self, arrays: Mapping[str, DeviceArray], launch: Callable[[], None]) -> None:
        contract = self._passes.contract
        key = tuple(arrays[tensor.name].shape for tensor in contract.inputs)
        if self._counts.get(key, 0) >= PASSES:
            launch()
            return
        self._counts[key] = self._counts.get(key, 0) + 1
        inputs = {}
        for tensor in contract.inputs:
            values = self._read(arrays[tensor.name])
            rounded = decoded(encoded(values, tensor.dtype), tensor.dtype).astype(values.dtype)
            # Both sides get the same values, also where the device's type is the narrower one.
            self._host.upload(rounded, arrays[tensor.name])
            inputs[tensor.name] = rounded
        launch()
        expected = {tensor.name: self._read(arrays[tensor.name]) for tensor in contract.outputs}
        outputs = self._passes(inputs, {name: values.shape for name, values in expected.items()})
        worst, problems = compare(self._graph, inputs, outputs, expected, self._tolerance)
        found = self._found
        found.passes += 1
        found.shapes.add(key)
        found.worst = max(found.worst, worst)
        found.problems += [problem for problem in problems if problem not in found.problems]

    def _read(self, array: DeviceArray) -> NDArray[Any]:
        values = np.empty(array.shape, array.dtype)
        self._host.download(array, values)
        return values
