"""The attention of a layer as one operator: ``TreeAttention`` or ``RotaryTreeAttention``.

In the row-invariant form of target models (``export.graphs.layers.attention_invariant``) it is about 20
operators. Draft heads have the operator ``Attention``, which computes over the whole capacity of the cache.
"""

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.graphs.patterns import input_of, number, only_user, producer, take_places, user
from runtime.engines.operators import DOMAIN

ATTENTION, ROTARY_ATTENTION = "TreeAttention", "RotaryTreeAttention"
# Head sizes that the operators compute.
HEAD_SIZES = range(16, 257, 16)


def join_attention(model: ir.Model) -> int:
    """Make the attention of every layer one operator, in place; returns how many there are.

    A graph with a layer that is not recognised stays as it is, and 0 is returned.
    """
    scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
    layers = [layer for layer in map(_match, scatters) if layer is not None]
    if not layers or 2 * len(layers) != len(scatters):
        return 0
    for layer in layers:
        _replace(model.graph, layer)
    model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    return len(layers)


def join_standard_attention(model: ir.Model) -> int:
    """The same for every ``Attention`` that reads caches which the graph writes; others stay as they are."""
    layers = [_match_standard(node) for node in model.graph if node.op_type == "Attention"]
    found = [layer for layer in layers if layer is not None]
    for layer in found:
        _replace(model.graph, layer)
    if found:
        model.opset_imports[DOMAIN] = 1
        RemoveUnusedNodesPass()(model)
    return len(found)


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
