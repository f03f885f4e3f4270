"""A product with constant weights, and what is done to its rows, as one operator: ``TreeProduct``.

Apart they are up to 9 operators, and ONNX Runtime's products of quantised weights take twice as long for nine
rows as for one.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graphs.patterns import input_of, only_user, producer, take_places
from export.quantisation.int8_activations import read_as
from export.quantisation.smoothing import ROTATED, hadamard
from runtime.engines.operators import DOMAIN

PRODUCT = "TreeProduct"
# What the operator knows: a multiple of so many weights in a block, so many at most, and so many columns.
BLOCK_MULTIPLE, LARGEST_BLOCK, LEAST_WIDTH = 32, 2**15, 16
BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4}


def join_products(model: ir.Model) -> int:
    """Make products with constant weights one operator each, in place; returns how many there are.

    What makes a product's rows becomes a part of it: a norm or the gate of an MLP, and a rotation after them.
    So does an addition to its result. Quantised weights with zero points stay as they are.
    """
    graph, count = model.graph, 0
    # From the end, because a rotation is a product too, and becomes a part of the one after it.
    for node in reversed([node for node in graph if node.op_type in ("MatMul", "Gemm")]):
        weights, result = _weights(graph, node), node.outputs[0]
        if weights is None or not (result.uses() or result.is_graph_output()):
            continue
        place, added = _addition(node)
        joined = _joined(node.inputs[0], weights, added)
        take_places(graph, place, joined, [place.outputs[0]])
        RemoveUnusedNodesPass()(model)
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
    return count


@dataclass(frozen=True)
class _Weights:
    """The constants of a product.

    codes: the bytes of the weights [K, N]; [N, K] if ``is_transposed``
    scales: [K / block, N], of quantised weights
    """

    codes: ir.Value
    scales: ir.Value | None
    bits: int
    depth: int
    width: int
    is_transposed: bool = False


def _joined(rows: ir.Value | None, weights: _Weights, added: ir.Value | None) -> ir.Node:
    unrotated = _before_rotation(rows) if weights.depth % ROTATED == 0 else None
    rows = rows if unrotated is None else unrotated
    ungated, norm = _before_gate(rows), _norm(rows)
    rows = next((value for value in (ungated, input_of(norm, 0)) if value is not None), rows)
    return ir.node(
        PRODUCT,
        [rows, weights.codes, weights.scales, input_of(norm, 1), added],
        {
            "bits": weights.bits,
            "depth": weights.depth,
            "width": weights.width,
            "transposed": int(weights.is_transposed),
            "normed": int(norm is not None),
            "epsilon": norm.attributes["epsilon"].as_float() if norm is not None else 0.0,
            "gated": int(ungated is not None),
            "rotated": int(unrotated is not None),
            "added": int(added is not None),
        },
        domain=DOMAIN,
    )


def _weights(graph: ir.Graph, product: ir.Node) -> _Weights | None:
    """The weights of a product; None for those that the operator does not know."""
    given = product.inputs[1]
    is_gemm = product.op_type == "Gemm"
    if given is None or (is_gemm and not _only_transposes(product)):
        return None
    if given.const_value is not None:
        return _float_weights(graph, given, given.const_value, is_gemm)
    restored = producer(given, "DequantizeLinear")
    return None if restored is None or is_gemm else _quantized_weights(graph, restored)


def _only_transposes(gemm: ir.Node) -> bool:
    values = {name: attribute.value for name, attribute in gemm.attributes.items()}
    return len(gemm.inputs) == 2 and values == {"transB": 1}


def _float_weights(
    graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, is_transposed: bool
) -> _Weights | None:
    if tensor.dtype != ir.DataType.FLOAT or len(tensor.shape) != 2:
        return None
    depth, width = tensor.shape.numpy()[:: -1 if is_transposed else 1]
    if depth % BLOCK_MULTIPLE or width < LEAST_WIDTH:
        return None
    codes = _as_constant(graph, value, tensor, ir.DataType.UINT8, [4 * depth * width])
    return _Weights(codes, None, 32, depth, width, is_transposed)


def _quantized_weights(graph: ir.Graph, restored: ir.Node) -> _Weights | None:
    codes, scales = restored.inputs[:2]
    kept = None if codes is None else codes.const_value
    factors = None if scales is None else scales.const_value
    if len(restored.inputs) > 2 or codes is None or scales is None or kept is None or factors is None:
        return None
    if len(kept.shape) != 2 or kept.dtype not in BITS or factors.dtype != ir.DataType.FLOAT:
        return None
    depth, width = kept.shape.numpy()
    blocks, rest = divmod(factors.size, width)
    axis = restored.attributes["axis"].as_int() if "axis" in restored.attributes else 1
    if rest or depth % (BLOCK_MULTIPLE * blocks) or depth > LARGEST_BLOCK * blocks:
        return None
    if axis != (1 if len(factors.shape) == 1 else 0):
        return None
    bits = BITS[kept.dtype]
    return _Weights(
        _as_constant(graph, codes, kept, ir.DataType.UINT8, [depth * width * bits // 8]),
        _as_constant(graph, scales, factors, ir.DataType.FLOAT, [blocks, width]),
        bits,
        depth,
        width,
    )


def _as_constant(
    graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, dtype: ir.DataType, shape: list[int]
) -> ir.Value:
    """The bytes of a constant in another type and shape."""
    name = f"{value.name}_{dtype.name.lower()}"
    if name in graph.initializers:
        return graph.initializers[name]
    result = ir.val(name, const_value=read_as(tensor, name, dtype, shape))
    graph.register_initializer(result)
    return result


def _addition(product: ir.Node) -> tuple[ir.Node, ir.Value | None]:
    """The last node of a product with what is added to its result, which is None for nothing."""
    result = product.outputs[0]
    add = only_user(result, "Add")
    other = None if add is None else next(value for value in add.inputs if value is not result)
    # A bias, and what is the same for every row, have other shapes.
    if add is None or other is None or other.shape is None or other.shape != add.outputs[0].shape:
        return product, None
    return add, other


def _norm(rows: ir.Value | None) -> ir.Node | None:
    """The norm along the last axis that made the rows of a product, if nothing else reads them."""
    norm = producer(rows, "RMSNormalization")
    if norm is None or rows is None or len(rows.uses()) > 1 or rows.is_graph_output():
        return None
    scale, axis = norm.inputs[1], norm.attributes["axis"].as_int() if "axis" in norm.attributes else -1
    is_constant = scale is not None and scale.const_value is not None
    return norm if is_constant and axis == -1 and "epsilon" in norm.attributes else None


def _before_gate(rows: ir.Value | None) -> ir.Value | None:
    """Gate and up side by side [..., 2 K], of which rows up * silu(gate) were made; None for other rows."""
    product = producer(rows, "Mul")
    silu = producer(input_of(product, 0), "Mul")
    gate, sigmoid = input_of(silu, 0), producer(input_of(silu, 1), "Sigmoid")
    split = producer(gate, "Split")
    if product is None or sigmoid is None or split is None or sigmoid.inputs[0] is not gate:
        return None
    widths = input_of(split, 1)
    sizes = None if widths is None or widths.const_value is None else widths.const_value.numpy().tolist()
    is_half = sizes is not None and sizes[0] == sizes[1]
    in_order = list(split.outputs) == [gate, product.inputs[1]]
    return split.inputs[0] if is_half and in_order and split.attributes["axis"].as_int() == -1 else None


def _before_rotation(rows: ir.Value | None) -> ir.Value | None:
    """Rows [..., K] before every 64 neighbours were multiplied with a Hadamard matrix; None if none were."""
    whole = producer(rows, "Reshape")
    product = producer(input_of(whole, 0), "MatMul")
    parts, matrix = producer(input_of(product, 0), "Reshape"), input_of(product, 1)
    tensor = None if matrix is None else matrix.const_value
    if parts is None or tensor is None or tensor.shape.numpy() != (ROTATED, ROTATED):
        return None
    return parts.inputs[0] if np.array_equal(tensor.numpy(), hadamard()) else None
