"""The form of a graph whose operators are compiled where they run (``runtime.engines.operators``).

A layer is 5 such operators, and 35 or more standard ones otherwise, each of which takes a time of its own
besides its arithmetic. They are of no standard. So the form is a file beside the portable one, and both
read the same file of weights.

``TreeAttention`` and ``RotaryTreeAttention`` are the attention of a layer, which has about 20 operators in
the row-invariant form of target models (``export.graphs.layers.attention_invariant``). Draft heads have the
operator ``Attention``, which computes over the whole capacity of the cache. ``TreeProduct`` is a product
with constant weights and what is done to its rows, up to 9 operators. ONNX Runtime's products of quantised
weights take twice as long for nine rows as for one.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.nodes import input_of, number, only_user, producer, take_places, user
from export.quantisation.int8_activations import read_as
from export.quantisation.smoothing import ROTATED, hadamard
from runtime.engines.operators import DOMAIN

ATTENTION, ROTARY_ATTENTION, PRODUCT = "TreeAttention", "RotaryTreeAttention", "TreeProduct"
# Head sizes that the operators compute.
HEAD_SIZES = range(16, 257, 16)
# What products know: a multiple of so many weights in a block, so many at most, and so many columns.
BLOCK_MULTIPLE, LARGEST_BLOCK, LEAST_WIDTH = 32, 2**15, 16
BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4}


def write_compiled_form(path: Path, result: Path, *, is_drafter: bool, joins_products: bool) -> bool:
    """Write the compiled form of the graph ``path``; returns whether there is one.

    There is none if the products that are to be joined, or a target model's attention, are not found.
    """
    model = ir.load(path)
    if is_drafter:
        _join_standard_attention(model)
    elif not _join_attention(model):
        return False
    if joins_products and not _join_products(model):
        return False
    model.opset_imports[DOMAIN] = 1
    ir.save(model, result)
    return True


def _join_attention(model: ir.Model) -> bool:
    """Make the attention of every layer one operator, in place; returns whether all layers are recognised."""
    scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
    layers = [layer for layer in map(_match, scatters) if layer is not None]
    if not layers or 2 * len(layers) != len(scatters):
        return False
    for layer in layers:
        _replace(model.graph, layer)
    RemoveUnusedNodesPass()(model)
    return True


def _join_standard_attention(model: ir.Model) -> None:
    """The same for every ``Attention`` that reads caches which the graph writes; others stay as they are."""
    layers = [_match_standard(node) for node in model.graph if node.op_type == "Attention"]
    for layer in layers:
        if layer is not None:
            _replace(model.graph, layer)
    RemoveUnusedNodesPass()(model)


@dataclass(frozen=True)
class _Layer:
    """The attention of a layer as it was traced.

    key, value: the nodes that write the caches
    query: [B, H, N, D]
    result: [B, N, H * D]
    softcap: 0 for none
    """

    key: ir.Node
    value: ir.Node
    query: ir.Value
    mask: ir.Value
    result: ir.Value
    scale: float
    softcap: float
    num_heads: int
    num_kv_heads: int


def _match(value: ir.Node) -> _Layer | None:
    """The layer whose values a TensorScatter writes into the cache; None for other caches and layers."""
    weighted = user(value.outputs[0], "MatMul", 1)
    exp = producer(input_of(weighted, 0), "Exp")
    shifted = producer(input_of(exp, 0), "Sub")
    masked = producer(input_of(shifted, 0), "Add")
    product, softcap = _without_softcap(input_of(masked, 0))
    turned = producer(input_of(product, 1), "Transpose")
    key = producer(input_of(turned, 0), "TensorScatter")
    scaled = producer(input_of(product, 0), "Mul")
    query, scale = _query(input_of(scaled, 0)), number(input_of(scaled, 1))
    mask, result = _mask(input_of(masked, 1)), _result(weighted)
    if key is None or query is None or mask is None or result is None or scale is None:
        return None
    heads = _numbers_of_heads(query, key)
    return None if heads is None else _Layer(key, value, query, mask, result, scale, softcap, *heads)


def _match_standard(node: ir.Node) -> _Layer | None:
    """The layer of an ``Attention``; None where its caches and its result are not as heads have them."""
    query, mask = input_of(node, 0), input_of(node, 3)
    key, value = (producer(input_of(node, index), "TensorScatter") for index in (1, 2))
    turned = only_user(node.outputs[0], "Transpose")
    flat = None if turned is None else only_user(turned.outputs[0], "Reshape")
    scale, softcap = node.attributes.get("scale"), node.attributes.get("softcap")
    if key is None or value is None or query is None or mask is None or flat is None or scale is None:
        return None
    if [user(each.outputs[0], "Attention", place) for place, each in ((1, key), (2, value))] != [node, node]:
        return None
    heads, cap = _numbers_of_heads(query, key), 0.0 if softcap is None else softcap.as_float()
    if heads is None:
        return None
    return _Layer(key, value, query, mask, flat.outputs[0], scale.as_float(), cap, *heads)


def _numbers_of_heads(query: ir.Value, key: ir.Node) -> tuple[int, int] | None:
    """H and KH of queries [B, H, N, D] and of a cache [B, KH, S, D]; None for a size D without operators."""
    cache = input_of(key, 0)
    if query.shape is None or cache is None or cache.shape is None:
        return None
    num_heads, num_kv_heads = query.shape[1], cache.shape[1]
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
        return None
    return (num_heads, num_kv_heads) if cache.shape[3] in HEAD_SIZES else None


def _query(rows: ir.Value | None) -> ir.Value | None:
    """Queries [B, H, N, D], of which the rows of a key head's product were made."""
    doubled = producer(rows, "Concat")
    if doubled is not None and doubled.attributes["axis"].as_int() == 2:
        rows = doubled.inputs[0]
    reshaped = producer(rows, "Reshape")
    return rows if reshaped is None else reshaped.inputs[0]


def _mask(bias: ir.Value | None) -> ir.Value | None:
    """The mask [B, 1, N, S] of which a bias for the rows of a key head's product was made."""
    while (joined := producer(bias, "Concat")) is not None:
        bias = joined.inputs[0]
    return input_of(producer(bias, "Where"), 0)


def _without_softcap(scores: ir.Value | None) -> tuple[ir.Node | None, float]:
    """The product of queries and keys, and the softcap of its scores."""
    times = producer(scores, "Mul")
    tanh, softcap = producer(input_of(times, 0), "Tanh"), number(input_of(times, 1))
    if tanh is None or softcap is None:
        return producer(scores, "MatMul"), 0.0
    divided = producer(input_of(tanh, 0), "Div")
    return producer(input_of(divided, 0), "MatMul"), softcap


def _result(weighted: ir.Node | None) -> ir.Value | None:
    """[B, N, H * D], as the layer's last product reads it."""
    if weighted is None:
        return None
    value = weighted.outputs[0]
    for operator in ("Div", "Slice", "Reshape", "Transpose", "Reshape"):
        node = user(value, operator, 0)
        if node is not None:
            value = node.outputs[0]
        elif operator != "Slice":  # of doubled rows
            return None
    return value


def _replace(graph: ir.Graph, layer: _Layer) -> None:
    packed = _packed(layer)
    apart = layer.query, layer.key.inputs[1], layer.value.inputs[1]
    joined = ir.node(
        ATTENTION if packed is None else ROTARY_ATTENTION,
        [
            *(apart if packed is None else packed),
            layer.mask,
            layer.value.inputs[2],
            layer.key.inputs[0],
            layer.value.inputs[0],
        ],
        {
            "num_heads": layer.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "scale": layer.scale,
            "softcap": layer.softcap,
        },
        domain=DOMAIN,
        num_outputs=3,
    )
    last = layer.result.producer()
    assert last is not None
    take_places(graph, last, joined, [layer.result, layer.key.outputs[0], layer.value.outputs[0]])


def _packed(layer: _Layer) -> tuple[ir.Value | None, ...] | None:
    """Queries, keys and values side by side [B, N, (H + 2 KH) * D], cosines and sines.

    None where the heads are not laid out and rotated together (``export.graphs.merge.join_heads``), or where
    not all of a head is rotated.
    """
    of_keys, of_values = layer.key.inputs[1], layer.value.inputs[1]
    parts = producer(layer.query, "Split")
    rotate = producer(input_of(parts, 0), "RotaryEmbedding")
    halves = producer(input_of(rotate, 0), "Split")
    turned = producer(input_of(halves, 0), "Transpose")
    reshaped = producer(input_of(turned, 0), "Reshape")
    if parts is None or rotate is None or halves is None or reshaped is None or len(rotate.inputs) != 3:
        return None
    in_order = [layer.query, of_keys] == list(parts.outputs) and [rotate.inputs[0], of_values] == list(
        halves.outputs
    )
    is_whole = all(
        name not in rotate.attributes or not rotate.attributes[name].as_int()
        for name in ("interleaved", "rotary_embedding_dim")
    )
    return (reshaped.inputs[0], *rotate.inputs[1:]) if in_order and is_whole else None


def _join_products(model: ir.Model) -> bool:
    """Make products with constant weights one operator each, in place; returns whether there are any.

    What makes a product's rows becomes a part of it: a norm or the gate of an MLP, and a rotation after them.
    So does an addition to its result. Quantised weights with zero points stay as they are.
    """
    graph, has_found = model.graph, False
    # From the end, because a rotation is a product too, and becomes a part of the one after it.
    for node in reversed([node for node in graph if node.op_type in ("MatMul", "Gemm")]):
        weights, result = _weights(graph, node), node.outputs[0]
        if weights is None or not (result.uses() or result.is_graph_output()):
            continue
        place, added = _addition(node)
        joined = _joined(node.inputs[0], weights, added)
        take_places(graph, place, joined, [place.outputs[0]])
        RemoveUnusedNodesPass()(model)
        has_found = True
    return has_found


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
    attributes = {name: attribute.value for name, attribute in product.attributes.items()}
    # Of Gemm only the product with a transposed matrix.
    if given is None or (is_gemm and (len(product.inputs) != 2 or attributes != {"transB": 1})):
        return None
    if given.const_value is not None:
        return _float_weights(graph, given, given.const_value, is_gemm)
    restored = producer(given, "DequantizeLinear")
    return None if restored is None or is_gemm else _quantized_weights(graph, restored)


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
