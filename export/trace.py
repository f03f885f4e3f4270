"""torch.export to an ONNX model in memory, with the names and axes of a contract."""

from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from runtime.bundle import GraphSpec

OPSET = 24
TORCH_TYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool}
# Example sizes of the symbolic axes: distinct, and none of them 1, which would be specialised.
EXAMPLE_AXES = {"B": 2, "N": 5, "M": 3, "S": 24, "A": 6}


def example_inputs(contract: GraphSpec) -> list[torch.Tensor]:
    """Valid inputs in contract order, at ``EXAMPLE_AXES``."""
    inputs = []
    for tensor in contract.inputs:
        shape = [EXAMPLE_AXES[size] if isinstance(size, str) else size for size in tensor.shape]
        fill = torch.ones if tensor.dtype == "bool" else torch.zeros
        inputs.append(fill(shape, dtype=TORCH_TYPES[tensor.dtype]))
    return inputs


def trace(module: nn.Module, contract: GraphSpec) -> ir.Model:
    """The ONNX graph of ``module``; its weights still live in torch's memory."""
    flat = example_inputs(contract)
    num_plain = sum(not tensor.name.startswith("past_") for tensor in contract.inputs)
    axes = dict.fromkeys(EXAMPLE_AXES, torch.export.Dim.DYNAMIC)
    shapes: list[Any] = [
        {i: axes[size] for i, size in enumerate(tensor.shape) if isinstance(size, str)}
        for tensor in contract.inputs
    ]
    program = torch.onnx.export(
        module.eval(),
        (*flat[:num_plain], flat[num_plain:]),
        dynamo=True,
        opset_version=OPSET,
        input_names=[t.name for t in contract.inputs],
        output_names=[t.name for t in contract.outputs],
        dynamic_shapes=(*shapes[:num_plain], shapes[num_plain:]),
        verbose=False,
        optimize=True,
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    return program.model
