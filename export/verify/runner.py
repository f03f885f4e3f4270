"""Passes of a graph or an engine, without the runtime's machinery.

``GraphRunner`` holds one sequence, and compares what its passes give. ``DevicePasses`` does single passes of
an engine on a device, from and to host memory, with caches updated in place.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from export.quantisation.precision import Precision
from export.verify.comparison import Tensors, check_difference
from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.device.device import Device, DeviceArray, DeviceEngine
from runtime.engines.ort_wheel import ort

# Positions of a cache whose capacity the graph leaves open.
CAPACITY = 64
# Positions of a cache that passes leave out whose masks may have fewer columns than the cache has positions.
UNREAD = 8
# The types of arrays by those of a contract's tensors.
TYPES = {name: np.dtype(name) for name in ("int64", "bool", "float32", "float16")}
TYPES["bfloat16"] = np.dtype(np.float32)

Execute = Callable[[Tensors], Tensors]


class GraphRunner:
    """One sequence in a graph with a small cache, which moves on with every pass.

    execute: runs a pass: all inputs by name, caches too, to all outputs; it takes and returns float32 where
        the contract has bfloat16
    precision: differences are judged by its activations
    All inputs and outputs of ``run`` are float32 or integers, whatever the graph computes in.
    """

    def __init__(self, execute: Execute, contract: GraphSpec, precision: Precision):
        self._execute = execute
        self.activations = precision.activations
        self.inputs = [tensor for tensor in contract.inputs if not tensor.name.startswith("past_")]
        sizes = {"B": 1, "S": _open_capacity(contract)}
        past = [tensor for tensor in contract.inputs if tensor not in self.inputs]
        # Graphs of a step read the positions of a cache that they do not have.
        positions = [t.shape[0] for t in self.inputs if t.name == "positions"]
        sizes_of_caches = [t.shape[2] for t in past] + positions
        # Columns of the masks.
        self.capacity = next((size for size in sizes_of_caches if isinstance(size, int)), sizes["S"])
        if past and any("R" in tensor.shape for tensor in self.inputs):
            self.capacity -= UNREAD
        # The contents of the caches by the names of the inputs, before the next pass.
        self.cache = {
            tensor.name: np.zeros(
                [sizes[n] if isinstance(n, str) else n for n in tensor.shape], TYPES[tensor.dtype]
            )
            for tensor in past
        }

    def run(self, **given: NDArray[Any]) -> Tensors:
        """All outputs but the cache.

        given: inputs by name, as the outputs without the batch axis. Those that the graph does not have are
            ignored; open axes of inputs that are not given have size 0.
        """
        inputs = {}
        for tensor in self.inputs:
            empty = np.zeros([0 if isinstance(size, str) else size for size in tensor.shape[1:]])
            array = np.asarray(given.get(tensor.name, empty), TYPES[tensor.dtype])
            inputs[tensor.name] = array[None] if tensor.shape[0] == "B" else array
        outputs = self._execute(inputs | self.cache)
        for name in self.cache:
            self.cache[name] = outputs.pop(name.replace("past_", "present_"))
        return {
            name: array[0] if array.dtype.kind in "ib" else array[0].astype(np.float32)
            for name, array in outputs.items()
        }

    def keep(self, start: int, path: NDArray[np.int64]) -> None:
        """Move the cache's positions ``start + path`` together, to ``start`` and after it."""
        for array in self.cache.values():
            array[:, :, start : start + path.size] = array[:, :, start + path]

    def difference(
        self, what: str, found: NDArray[Any], expected: NDArray[Any], *, slack: float = 1.0
    ) -> float:
        """``check_difference`` with the tolerance of this graph's activations."""
        return check_difference(what, found, expected, self.activations, slack=slack)


# Compares a graph or an engine with PyTorch: the largest differences by name.
Check = Callable[[GraphRunner], dict[str, float]]


def _open_capacity(contract: GraphSpec) -> int:
    """Positions of a cache whose capacity is open: those of streams come on top, for each of some nodes."""
    shapes = [t.shape for t in contract.outputs if t.name == "frame_tokens" and len(t.shape) == 4]
    frames = shapes[0][2] if shapes else 0
    assert isinstance(frames, int)
    return CAPACITY + 8 * frames


def onnx_runner(
    path: Path, contract: GraphSpec, precision: Precision, operators: Path | None = None
) -> GraphRunner:
    """The graph of a file on ONNX Runtime's CPU provider.

    operators: the library of ``runtime.engines.operators``, for a graph that uses it
    """
    options = ort.SessionOptions()
    if operators is not None:
        options.register_custom_ops_library(str(operators))
    # Errors only: without bound buffers every TensorScatter warns that it copies.
    options.log_severity_level = 3
    # Packed weights would double the memory of a check that runs a handful of passes.
    options.add_session_config_entry("session.disable_prepacking", "1")
    # Between the few passes idle threads would only take cores from others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with runnable(path, contract) as (model, _):
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def execute(inputs: Tensors) -> Tensors:
        return dict(zip(names, session.run(None, inputs), strict=True))

    return GraphRunner(execute, contract, precision)


@contextmanager
def runnable(path: Path, contract: GraphSpec) -> Iterator[tuple[Path, bool]]:
    """A file of the graph that ONNX Runtime runs on a CPU, and whether it was cast up for that.

    It is the very file unless the graph reads or computes bfloat16. Then it is a temporary copy in float32,
    with the same rounded weights.
    """
    if all(tensor.dtype != "bfloat16" for tensor in (*contract.inputs, *contract.outputs)):
        yield path, False
        return
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        model = ir.load(path)
        cast_up(model)
        copy = Path(directory) / path.name
        ir.save(model, copy, external_data=f"{path.name}.data")
        yield copy, True


def cast_up(model: ir.Model) -> None:
    """Turn every bfloat16 value of a graph into a float32 one, in place."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    for value in values:
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in graph:
        attributes = node.attributes
        if node.op_type == "Cast" and attributes["to"].as_int() == ir.DataType.BFLOAT16:
            attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
        if (
            node.op_type == "ConstantOfShape"
            and attributes["value"].as_tensor().dtype == ir.DataType.BFLOAT16
        ):
            fill = attributes["value"].as_tensor().numpy().astype(np.float32)
            attributes["value"] = ir.AttrTensor("value", ir.tensor(fill))


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
    """Values in a device's type; of bfloat16 the 16 bits, rounded to even."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else values.astype(dtype)


def decoded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The other way around: float16 and bfloat16 become float32."""
    if dtype == "bfloat16":
        values = values.view(ml_dtypes.bfloat16)
    return values.astype(np.float32) if dtype in ("float16", "bfloat16") else values
