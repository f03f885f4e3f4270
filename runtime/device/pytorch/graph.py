"""An ONNX file as PyTorch reads it: nodes with plain attributes, and weights as tensors of the host.

Also what an operator is: how the function of a node is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from torch import Tensor

# By the numbers that ONNX gives its types.
TORCH_TYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT8: torch.int8,
    # torch has no arithmetic of four bits: every code takes a byte.
    TensorProto.INT4: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.BOOL: torch.bool,
    TensorProto.UINT32: torch.uint32,
    TensorProto.DOUBLE: torch.float64,
}


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    inputs: names of values; an input that is left out is an empty string
    attributes: numbers, lists, strings, and tensors of the host
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """The nodes of a graph in the order of their computation, and its constants by name."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]


# Takes the inputs that are not fixed, None for one that is left out.
Function = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Inputs:
    """What is known of a node before it runs.

    tensors: of the inputs in their shapes and types; None for one that is left out
    values: of the inputs that follow from shapes and constants, by their places
    """

    node: Node
    tensors: Sequence[Tensor | None]
    values: Mapping[int, Tensor]

    def get(self, attribute: str, default: Any) -> Any:
        return self.node.attributes.get(attribute, default)

    def shape(self, index: int = 0) -> list[int]:
        tensor = self.tensors[index]
        assert tensor is not None
        return list(tensor.shape)

    def axis(self, default: int) -> int:
        """The attribute ``axis``, counted from the first axis of the first input."""
        axis: int = self.get("axis", default)
        return axis % max(len(self.shape()), 1)

    def numbers(self, index: int) -> list[int] | None:
        """The values of an input; None for one that is left out."""
        return self.values[index].reshape(-1).tolist() if index in self.values else None


@dataclass(frozen=True)
class Operator:
    """make: the function of a node; fixed: places of the inputs that the function does not take, because
    their values are needed to make it"""

    make: Callable[[Inputs], Function]
    fixed: tuple[int, ...] = ()


def read_graph(path: Path) -> Graph:
    """Read a file and the weights beside it. Weights in files of their own are mapped and not copied."""
    model = onnx.load(path, load_external_data=False)
    constants = {each.name: _tensor(each, path.parent) for each in model.graph.initializer}
    nodes = []
    for each in model.graph.node:
        attributes = {one.name: _attribute(one, path.parent) for one in each.attribute}
        operator = f"{each.domain}::{each.op_type}" if each.domain else each.op_type
        nodes.append(Node(each.name, operator, tuple(each.input), tuple(each.output), attributes))
    return Graph(tuple(nodes), constants)


def _attribute(attribute: Any, directory: Path) -> Any:
    if attribute.type == AttributeProto.TENSOR:
        return _tensor(attribute.t, directory)
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, int | float) else list(value)


def _tensor(tensor: Any, directory: Path) -> Tensor:
    if tensor.data_type not in TORCH_TYPES:
        name = TensorProto.DataType.Name(tensor.data_type)
        raise ValueError(f"the type {name} of {tensor.name!r} is none of this engine's")
    dtype, shape = TORCH_TYPES[tensor.data_type], tuple(tensor.dims)
    if not uses_external_data(tensor):
        # The bits go by way of integers, because numpy has no bfloat16.
        values = np.ascontiguousarray(numpy_helper.to_array(tensor)).copy()
        if tensor.data_type == TensorProto.INT4:
            values = values.astype(np.int8)
        return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(shape)
    info = ExternalDataInfo(tensor)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    if tensor.data_type == TensorProto.INT4:
        return _codes(directory / info.location, info.offset or 0, count).reshape(shape)
    # Copy on write: the file itself never changes.
    data = np.memmap(directory / info.location, np.uint8, "c", offset=info.offset or 0, shape=(count,))
    if (info.offset or 0) % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)


def _codes(path: Path, offset: int, count: int) -> Tensor:
    """Codes of four bits with a sign, two in a byte, the first in its low half."""
    data = np.fromfile(path, np.int8, -(-count // 2), offset=offset)
    pairs = np.stack((data << 4 >> 4, data >> 4), -1)
    return torch.from_numpy(pairs.reshape(-1)[:count])
