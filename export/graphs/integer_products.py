"""A second form of a graph: its products of smoothed int8 weights with activations in int8, by row.

The first form, of standard operators, holds for every such product DequantizeLinear and MatMul in float32.
Here an input [..., K] is divided by its rows' largest magnitudes, rounded to uint8 around 128, multiplied by
``com.microsoft.MatMulIntegerToFloat``, and multiplied by the magnitudes again. Activations are unsigned
because ONNX Runtime's kernel for signed ones is many times slower. A sum of whole numbers is the same in any
order and beside any other row.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.quantisation.int8_activations import LARGEST_CODE

DOMAIN = "com.microsoft"
ZERO = 128


def write_integer_graph(path: Path, result: Path) -> None:
    """Write the second form of the graph ``path``; both share the file of weights."""
    model = ir.load(path)
    multiply_integers(model)
    ir.save(model, result)


def multiply_integers(model: ir.Model) -> int:
    """Replace the products of whole int8 columns, in place; returns their number.

    A row of zeros is divided by zero. Its codes are those of no number, and mean nothing, because the product
    is multiplied by zero in the end.
    """
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    count = 0
    for node in list(graph):
        weights = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] else None
        if weights is None or not _has_columns_of_int8(weights):
            continue
        if not constants:
            constants = _register_constants(graph)
        rows = node.inputs[0]
        assert rows is not None
        if rows not in rounded:
            rounded[rows] = _round(graph, node, rows, constants)
        codes, largest = rounded[rows]
        operands = [codes, weights.inputs[0], constants["step"], weights.inputs[1], constants["zero_point"]]
        product = ir.node("MatMulIntegerToFloat", operands, domain=DOMAIN)
        scaled = ir.node("Mul", [product.outputs[0], largest])
        old, new = node.outputs[0], scaled.outputs[0]
        _describe(product.outputs[0], f"{old.name}_of_codes", old.dtype, old.shape)
        _describe(new, old.name, old.dtype, old.shape)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [product, scaled], [old], [new])
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    return count


def _has_columns_of_int8(node: ir.Node) -> bool:
    codes = node.inputs[0]
    whole = node.op_type == "DequantizeLinear" and "block_size" not in node.attributes
    return whole and codes is not None and codes.dtype == ir.DataType.INT8


def _register_constants(graph: ir.Graph) -> dict[str, ir.Value]:
    arrays: dict[str, NDArray[Any] | np.generic] = {
        "step": np.float32(1 / LARGEST_CODE),
        "zero_point": np.uint8(ZERO),
        "last_axis": np.array([-1], np.int64),
    }
    values = {name: ir.val(f"int8_{name}", const_value=ir.tensor(array)) for name, array in arrays.items()}
    for value in values.values():
        graph.register_initializer(value)
    return values


def _round(
    graph: ir.Graph, before: ir.Node, rows: ir.Value, constants: dict[str, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Codes [..., K] uint8 and largest magnitudes [..., 1] of rows [..., K]."""
    magnitudes = ir.node("Abs", [rows])
    largest = ir.node("ReduceMax", [magnitudes.outputs[0], constants["last_axis"]], {"keepdims": 1})
    divided = ir.node("Div", [rows, largest.outputs[0]])
    codes = ir.node("QuantizeLinear", [divided.outputs[0], constants["step"], constants["zero_point"]])
    exact = (magnitudes, largest, divided)
    for node, name in zip((*exact, codes), ("magnitudes", "largest", "divided", "codes"), strict=True):
        dtype = rows.dtype if node in exact else ir.DataType.UINT8
        shape = rows.shape if node is not largest else None
        _describe(node.outputs[0], f"{rows.name}_{name}", dtype, shape)
    graph.insert_before(before, [*exact, codes])
    return codes.outputs[0], largest.outputs[0]


def _describe(value: ir.Value, name: str | None, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    value.name, value.shape = name, shape
    if dtype is not None:
        value.dtype = dtype
