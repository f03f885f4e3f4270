"""Single passes of an engine on a device, from and to host memory, with caches updated in place."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.device.device import Device, DeviceArray, DeviceEngine

Shapes = Mapping[str, tuple[int, ...]]


class DevicePasses:
    """Runs an engine on arrays of numpy; float16 and bfloat16 are float32 on the host."""

    def __init__(self, device: Device, engine: DeviceEngine, contract: GraphSpec):
        self.contract = contract
        self._device, self._engine = device, engine
        self._memory: dict[str, DeviceArray] = {}

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], shapes: Shapes | None = None
    ) -> dict[str, NDArray[Any]]:
        """All outputs of a pass by name.

        shapes: of the outputs; None if they follow from those of the inputs
        """
        if shapes is None:
            shapes = output_shapes(self.contract, inputs)
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
        outputs: dict[str, NDArray[Any]] = {}
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


def output_shapes(contract: GraphSpec, inputs: Mapping[str, NDArray[Any]]) -> Shapes:
    """The shapes of a graph's outputs, from the sizes of the axes of its inputs."""
    sizes: dict[str, int] = {}
    for tensor in contract.inputs:
        axes = zip(tensor.shape, inputs[tensor.name].shape, strict=True)
        sizes.update((axis, size) for axis, size in axes if isinstance(axis, str))
    sizes = with_output_axes(sizes)
    return {
        tensor.name: tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
        for tensor in contract.outputs
    }


def with_output_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of axes by name, with those that only outputs of autoregressive heads' graphs have."""
    # EAGLE has children of every state, Hydra of every path.
    nodes = sum(size for axis, size in sizes.items() if axis[0] == "M" and axis[1:].isdigit())
    return {"M": sizes.get("P", nodes), "L1": sizes.get("L", 0) + 1, **sizes}


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
