"""The graph that multiplies int8 activations with int8 weights.

An engine rounds the activations of a row with one scale, and the weights of a column with one scale; so their
sums are whole numbers, the same in any order and beside any other row. ``export.quantisation.smoothing``
prepares both.

Every such product is DequantizeLinear and MatMul in float32 in a graph of standard operators. In its second
form, ``backbone.int8.onnx``, an input [..., K] is divided by its rows' largest magnitudes, rounded to uint8
around 128, multiplied by ``com.microsoft.MatMulIntegerToFloat``, and multiplied by the magnitudes again.
Activations are unsigned because ONNX Runtime's kernel for signed ones is many times slower. Its twin
``backbone.uint8.onnx`` has unsigned weights too, for processors on which products with signed ones overflow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.nodes import constant

LARGEST_CODE = 127
DOMAIN = "com.microsoft"
ZERO = 128


def write_integer_graph(path: Path, result: Path, *, unsigned: bool) -> None:
    """Write a second form of the graph ``path``, which shares its file of weights.

    unsigned: as of ``multiply_integers``
    """
    model = ir.load(path)
    multiply_integers(model, unsigned=unsigned)
    ir.save(model, result)


def multiply_integers(model: ir.Model, *, unsigned: bool) -> int:
    """Replace the products of whole int8 columns, in place; returns their number.

    unsigned: weights are uint8 around 128. The graph makes them from the bytes of the signed ones, which an
        engine does once, when it loads the graph.

    A row of zeros is divided by zero. Its codes are those of no number, and mean nothing, because the product
    is multiplied by zero in the end.
    """
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    flipped: dict[ir.Value, ir.Value] = {}
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
            rounded[rows] = _add_rounding(graph, node, rows, constants)
        codes, largest = rounded[rows]
        signed, scales = weights.inputs
        assert signed is not None
        operands = [codes, signed, constants["step"], scales, constants["zero_point"]]
        if unsigned:
            if signed not in flipped:
                flipped[signed] = _as_unsigned(graph, node, signed, constants["zero_point"])
            operands[1] = flipped[signed]
            operands.append(constants["zero_point"])
        old = node.outputs[0]
        of_codes = ir.val(f"{old.name}_of_codes", old.dtype, old.shape)
        new = ir.val(old.name, old.dtype, old.shape)
        product = ir.node("MatMulIntegerToFloat", operands, domain=DOMAIN, outputs=[of_codes])
        scaled = ir.node("Mul", [of_codes, largest], outputs=[new])
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


def read_as(
    tensor: ir.TensorProtocol, name: str, dtype: ir.DataType, shape: Sequence[int]
) -> ir.TensorProtocol:
    """The bytes of a tensor in another type and shape; those of a file stay there."""
    if not isinstance(tensor, ir.ExternalTensor):
        return ir.tensor(np.frombuffer(tensor.tobytes(), dtype.numpy()).reshape(shape), name=name)
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        dtype,
        shape=ir.Shape(shape),
        name=name,
        base_dir=tensor.base_dir,
    )


def _as_unsigned(graph: ir.Graph, before: ir.Node, signed: ir.Value, zero_point: ir.Value) -> ir.Value:
    """Codes from 1 to 255, of those from -127 to 127: the same bytes but for the highest bit."""
    stored = signed.const_value
    assert stored is not None
    raw = read_as(stored, f"{signed.name}_bytes", ir.DataType.UINT8, stored.shape.numpy())
    value = ir.val(raw.name, const_value=raw)
    graph.register_initializer(value)
    flipped = ir.val(f"{signed.name}_unsigned", ir.DataType.UINT8, signed.shape)
    graph.insert_before(before, [ir.node("BitwiseXor", [value, zero_point], outputs=[flipped])])
    return flipped


def _register_constants(graph: ir.Graph) -> dict[str, ir.Value]:
    arrays: dict[str, NDArray[Any]] = {
        "step": np.array(1 / LARGEST_CODE, np.float32),
        "zero_point": np.array(ZERO, np.uint8),
        "last_axis": np.array([-1], np.int64),
    }
    return {name: constant(graph, f"int8_{name}", array) for name, array in arrays.items()}


def _add_rounding(
    graph: ir.Graph, before: ir.Node, rows: ir.Value, constants: dict[str, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Codes [..., K] uint8 and largest magnitudes [..., 1] of rows [..., K]."""
    magnitudes = ir.val(f"{rows.name}_magnitudes", rows.dtype, rows.shape)
    largest = ir.val(f"{rows.name}_largest", rows.dtype)
    divided = ir.val(f"{rows.name}_divided", rows.dtype, rows.shape)
    codes = ir.val(f"{rows.name}_codes", ir.DataType.UINT8, rows.shape)
    of_codes = [divided, constants["step"], constants["zero_point"]]
    nodes = [
        ir.node("Abs", [rows], outputs=[magnitudes]),
        ir.node("ReduceMax", [magnitudes, constants["last_axis"]], {"keepdims": 1}, outputs=[largest]),
        ir.node("Div", [rows, largest], outputs=[divided]),
        ir.node("QuantizeLinear", of_codes, outputs=[codes]),
    ]
    graph.insert_before(before, nodes)
    return codes, largest
