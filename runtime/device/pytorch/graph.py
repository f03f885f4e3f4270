"""An ONNX file as PyTorch reads it: nodes with plain attributes, and weights as tensors of the host."""

from collections.abc import Mapping
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
        return torch.from_numpy(values.reshape(-1).view(np.uint8)).view(dtype).reshape(shape)
    info = ExternalDataInfo(tensor)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    # Copy on write: the file itself never changes.
    data = np.memmap(directory / info.location, np.uint8, "c", offset=info.offset or 0, shape=(count,))
    if (info.offset or 0) % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)
