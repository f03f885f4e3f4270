"""An engine of the reference whose passes are repeated by the same engine of a device, and compared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.comparison import Tensors, compare
from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.device.device import Device, DeviceArray, DeviceEngine

# Passes that are compared of a graph in the same shapes.
PASSES = 4


@dataclass
class Found:
    """What was found of one graph: passes that were compared, their shapes, the largest difference."""

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
        passes: "DevicePasses",
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


class DevicePasses:
    """Single passes of a device's engine from and to host memory, with caches updated in place."""

    def __init__(self, device: Device, engine: DeviceEngine, contract: GraphSpec):
        self.contract = contract
        self._device, self._engine = device, engine
        self._memory: dict[str, DeviceArray] = {}

    def __call__(self, inputs: Mapping[str, NDArray[Any]], shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        arrays: dict[str, DeviceArray] = {}
        for tensor in self.contract.inputs:
            values = np.ascontiguousarray(encoded(inputs[tensor.name], tensor.dtype))
            arrays[tensor.name] = self._array(tensor, values.shape)
            self._device.upload(values, arrays[tensor.name])
            self._device.synchronize()
        for tensor in self.contract.outputs:
            # Caches are updated in place.
            past = arrays.get(tensor.name.replace("present_", "past_"))
            arrays[tensor.name] = past or self._array(tensor, shapes[tensor.name])
        self._engine.run(arrays)
        outputs: Tensors = {}
        for tensor in self.contract.outputs:
            storage = np.dtype(np.uint16 if tensor.dtype == "bfloat16" else tensor.dtype)
            values = np.empty(shapes[tensor.name], storage)
            self._device.download(arrays[tensor.name], values)
            self._device.synchronize()
            outputs[tensor.name] = decoded(values, tensor.dtype)
        return outputs

    def _array(self, tensor: TensorSpec, shape: tuple[int, ...]) -> DeviceArray:
        """Memory of a tensor, which the passes share whose shapes fit."""
        wanted = DeviceArray(0, shape, tensor.dtype)
        memory = self._memory.get(tensor.name)
        if memory is None or memory.nbytes < wanted.nbytes:
            memory = self._memory[tensor.name] = self._device.allocate(shape, tensor.dtype)
        return memory.view(shape)


def encoded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values in a device's type; numpy has no bfloat16, so that is its 16 bits, rounded to even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decoded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The other way around: float16 and bfloat16 become float32."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "float16" else values
