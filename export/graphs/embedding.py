"""Quantise the token embedding: int8 codes with one scale for each token.

A pass looks up the codes and the scales of its tokens and multiplies them; the table is never dequantised.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graphs.quantization import QuantizedMatrix, digest, quantize
from export.precision import WeightForm

# Of the transposed table [H, V]: a scale for each column.
FORM = WeightForm("int8", None)


def quantize_embedding(
    model: ir.Model, shape: tuple[int, int], scale_dtype: str
) -> dict[str, QuantizedMatrix]:
    """Quantise every table of this shape [V, H] that a Gather reads, in place.

    scale_dtype: the type of the activations
    Returns the transposed tables by the digest of what they were, like ``quantize_products``.
    """
    found: dict[str, QuantizedMatrix] = {}
    tables: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in [node for node in model.graph if node.op_type == "Gather"]:
        table = node.inputs[0]
        tensor = None if table is None else table.const_value
        if table is None or tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        if tuple(tensor.shape.numpy()) != shape:
            continue
        if table not in tables:
            matrix = tensor.numpy().T
            quantized = quantize(matrix, FORM, scale_dtype)
            found[digest(matrix)] = quantized
            tables[table] = _register(model.graph, table, quantized)
        _look_up(model.graph, node, *tables[table])
    RemoveUnusedNodesPass()(model)
    return found


def _register(graph: ir.Graph, table: ir.Value, quantized: QuantizedMatrix) -> tuple[ir.Value, ir.Value]:
    """Codes [V, H] and scales [V, 1] as weights of the graph."""
    arrays = {"codes": np.ascontiguousarray(quantized.codes.T), "scales": quantized.scales[:, None]}
    codes, scales = (
        ir.val(f"{table.name}_{name}", const_value=ir.tensor(array)) for name, array in arrays.items()
    )
    graph.register_initializer(codes)
    graph.register_initializer(scales)
    return codes, scales


def _look_up(graph: ir.Graph, gather: ir.Node, codes: ir.Value, scales: ir.Value) -> None:
    """Gather of the table becomes the product of what Gathers of codes and scales give."""
    ids, result = gather.inputs[1], gather.outputs[0]
    assert codes.dtype is not None
    assert scales.dtype is not None
    rows = ir.node("Gather", [codes, ids], {"axis": 0})
    row_scales = ir.node("Gather", [scales, ids], {"axis": 0})
    cast = ir.node("Cast", [rows.outputs[0]], {"to": scales.dtype})
    product = ir.node("Mul", [cast.outputs[0], row_scales.outputs[0]])
    nodes = [rows, row_scales, cast, product]
    for number, node in enumerate(nodes):
        node.outputs[0].name = f"{result.name}_of_codes_{number}"
        node.outputs[0].dtype = codes.dtype if node is rows else scales.dtype
    for node in (rows, cast, product):
        node.outputs[0].shape = result.shape
    name = result.name
    ir.convenience.replace_nodes_and_values(graph, gather, [gather], nodes, [result], [product.outputs[0]])
    product.outputs[0].name = name
