"""torch.export to an ONNX model in memory, with the names and axes of a contract."""

from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from runtime.bundle import GraphSpec

OPSET = 24
TORCH_TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
# Example sizes of the symbolic axes: distinct, and none of them 1, which would be specialised.
EXAMPLE_AXES = {"B": 2, "N": 5, "M": 3, "S": 24, "A": 6, "Q": 4, "P": 9, "T": 2}
# Rows of each depth, for a head that has one of its own a depth: M0, M1, ...
FIRST_DEPTH = 30


def example_inputs(contract: GraphSpec) -> list[torch.Tensor]:
    """Valid inputs in contract order, at ``EXAMPLE_AXES``."""
    inputs = []
    for tensor in contract.inputs:
        shape = [_example(size) if isinstance(size, str) else size for size in tensor.shape]
        fill = torch.ones if tensor.dtype == "bool" else torch.zeros
        inputs.append(fill(shape, dtype=TORCH_TYPES[tensor.dtype]))
    return inputs


def _example(axis: str) -> int:
    return EXAMPLE_AXES[axis] if axis in EXAMPLE_AXES else FIRST_DEPTH + int(axis.removeprefix("M"))


def trace(module: nn.Module, contract: GraphSpec) -> ir.Model:
    """The ONNX graph of ``module(inputs by name, caches)``; its weights still live in torch's memory."""
    flat = example_inputs(contract)
    plain = [tensor.name for tensor in contract.inputs if not tensor.name.startswith("past_")]
    dynamic = torch.export.Dim.DYNAMIC
    shapes: list[Any] = [
        {i: dynamic for i, size in enumerate(tensor.shape) if isinstance(size, str)}
        for tensor in contract.inputs
    ]
    program = torch.onnx.export(
        module.eval(),
        (dict(zip(plain, flat, strict=False)), flat[len(plain) :]),
        dynamo=True,
        opset_version=OPSET,
        input_names=[t.name for t in contract.inputs],
        output_names=[t.name for t in contract.outputs],
        dynamic_shapes=(dict(zip(plain, shapes, strict=False)), shapes[len(plain) :]),
        verbose=False,
        optimize=True,
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    return program.model
