"""Make a bfloat16 graph runnable: ONNX Runtime's CPU provider has no bfloat16 kernels."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from runtime.core.bundle import GraphSpec


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
