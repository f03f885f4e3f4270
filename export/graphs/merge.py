"""Operators that do the same to several tensors become one: products of the same rows, and what follows.

An operator on few rows takes a time of its own besides its arithmetic, 2 to 4 microseconds, and a product
more: threads are woken, rows are rounded to int8. Q, K and V of a layer become one product, gate and up of an
MLP another, and the heads of Q, K and V are laid out and rotated together. Every value stays what it was.
SmolLM2-135M has 211 products with weights, and 121 after this.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.nodes import constant, only_user

# A matrix [K, N] with N beyond so many times K is taken for an LM head. In an MLP, N is 1 to 4 times K.
WIDEST = 4


def merge_products(model: ir.Model) -> int:
    """Merge the products that read the same rows, in place; returns how many products are gone.

    Their weights [K, N] are constants, or constants that a DequantizeLinear of one form restores. A matrix
    that several products read stays as it is, because merging would store it twice. An LM head stays too,
    because Split would copy its logits.
    """
    groups: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "MatMul" and (form := _form(node)) is not None:
            groups[(node.inputs[0], *form)].append(node)
    gone = 0
    for nodes in groups.values():
        if len(nodes) > 1:
            _merge(model.graph, nodes)
            gone += len(nodes) - 1
    RemoveUnusedNodesPass()(model)
    return gone


def join_heads(model: ir.Model) -> int:
    """Lay out the heads of merged products together, in place; returns how many products have such heads.

    Split, and for each part Reshape to [B, N, heads, D], Transpose and perhaps a RotaryEmbedding, become one
    Reshape and one Transpose, Split of the heads, and one RotaryEmbedding of all heads that are rotated.
    """
    joined = 0
    shapes: dict[tuple[object, ...], ir.Value] = {}
    for split in [node for node in model.graph if node.op_type == "Split"]:
        parts = [_head_layout(part) for part in split.outputs]
        layouts = [part for part in parts if part is not None]
        first = layouts[0] if layouts else None
        if first is None or len(layouts) < len(parts) or split.attributes["axis"].as_int() != -1:
            continue
        if first.sizes is None or any(part.sizes != first.sizes for part in layouts):
            continue
        key = (*first.sizes, _num_heads(layouts))
        if key not in shapes:
            shapes[key] = _shape(model.graph, split, first, _num_heads(layouts))
        _join(model.graph, split, layouts, shapes[key])
        joined += 1
    RemoveUnusedNodesPass()(model)
    # The size of the heads and the angles may be computed after the product.
    model.graph.sort()
    return joined


@dataclass(frozen=True)
class _HeadLayout:
    """How a part of a product's columns becomes heads [B, heads, N, D]; ``rotate`` is None for values."""

    reshape: ir.Node
    transpose: ir.Node
    rotate: ir.Node | None
    num_heads: int

    @property
    def sizes(self) -> tuple[object, ...] | None:
        """B, N and D, as values or numbers; None where the shape is neither a constant nor put together."""
        shape = self.reshape.inputs[1]
        if shape is None:
            return None
        if shape.const_value is not None:
            numbers = shape.const_value.numpy().tolist()
            return tuple(numbers[:2] + numbers[3:])
        sizes = shape.producer()
        if sizes is None or sizes.op_type != "Concat" or len(sizes.inputs) != 4:
            return None
        return (*sizes.inputs[:2], sizes.inputs[3])

    def rotation(self) -> tuple[object, ...] | None:
        """What heads that are rotated together have in common."""
        if self.rotate is None:
            return None
        attributes = sorted((name, each.value) for name, each in self.rotate.attributes.items())
        return (*self.rotate.inputs[1:], *(pair for pair in attributes if pair[0] != "num_heads"))


def _head_layout(part: ir.Value) -> _HeadLayout | None:
    reshape = only_user(part, "Reshape")
    transpose = only_user(reshape.outputs[0], "Transpose") if reshape else None
    if reshape is None or transpose is None or list(transpose.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
        return None
    heads = transpose.outputs[0]
    num_heads = heads.shape[1] if heads.shape is not None and len(heads.shape) == 4 else None
    if not isinstance(num_heads, int):
        return None
    return _HeadLayout(reshape, transpose, only_user(heads, "RotaryEmbedding"), num_heads)


def _join(graph: ir.Graph, split: ir.Node, parts: list[_HeadLayout], shape: ir.Value) -> None:
    product, first = split.inputs[0], parts[0]
    assert product is not None
    reshaped = ir.val(f"{product.name}_Reshape", type=product.type)
    turned = ir.val(f"{product.name}_Transpose", type=product.type)
    new = [
        ir.node("Reshape", [product, shape], dict(first.reshape.attributes), outputs=[reshaped]),
        ir.node("Transpose", [reshaped], dict(first.transpose.attributes), outputs=[turned]),
    ]
    # Neighbours that are rotated alike stay together until they are rotated.
    groups = [list(group) for _, group in groupby(parts, _HeadLayout.rotation)]
    whole = [turned]
    if len(groups) > 1:
        whole = _split_heads(graph, new, turned, [_num_heads(group) for group in groups])
    for heads, group in zip(whole, groups, strict=True):
        rotate = group[0].rotate
        if rotate is not None:
            attributes = {**rotate.attributes, "num_heads": ir.AttrInt64("num_heads", _num_heads(group))}
            rotated = ir.val(f"{heads.name}_rotated", type=product.type)
            inputs = [heads, *rotate.inputs[1:]]
            new.append(ir.node("RotaryEmbedding", inputs, attributes, outputs=[rotated]))
            heads = rotated
        each = [heads]
        if len(group) > 1:
            each = _split_heads(graph, new, heads, [part.num_heads for part in group])
        for part, after in zip(group, each, strict=True):
            before = (part.rotate or part.transpose).outputs[0]
            after.shape = before.shape
            ir.convenience.replace_all_uses_with(before, after)
    graph.insert_after(split, new)


def _shape(graph: ir.Graph, before: ir.Node, part: _HeadLayout, num_heads: int) -> ir.Value:
    """The shape of a part with another number of heads."""
    given = part.reshape.inputs[1]
    assert given is not None
    name = f"{given.name}_of_{num_heads}"
    if given.const_value is not None:
        numbers = given.const_value.numpy().copy()
        numbers[2] = num_heads
        return constant(graph, name, numbers)
    sizes = given.producer()
    assert sizes is not None
    heads = constant(graph, f"{name}_heads", np.array([num_heads], np.int64))
    shape = ir.val(name, type=given.type)
    inputs = [*sizes.inputs[:2], heads, sizes.inputs[3]]
    graph.insert_before(before, ir.node("Concat", inputs, {"axis": 0}, outputs=[shape]))
    return shape


def _num_heads(parts: Sequence[_HeadLayout]) -> int:
    return sum(part.num_heads for part in parts)


def _split_heads(graph: ir.Graph, new: list[ir.Node], heads: ir.Value, counts: list[int]) -> list[ir.Value]:
    """Parts of heads [B, heads, N, D]; the node is added to ``new``."""
    sizes = constant(graph, f"{heads.name}_counts", np.array(counts, np.int64))
    parts = [ir.val(f"{heads.name}_{number}", type=heads.type) for number in range(len(counts))]
    new.append(ir.node("Split", [heads, sizes], {"axis": 1}, outputs=parts))
    return parts


def _form(node: ir.Node) -> tuple[object, ...] | None:
    """What weights must have in common; None where a product's weights cannot be merged."""
    weights = node.inputs[1]
    if weights is None or len(weights.uses()) > 1:
        return None
    if weights.is_initializer():
        constants: Sequence[ir.Value | None] = (weights,)
        attributes: tuple[object, ...] = ()
    else:
        producer = weights.producer()
        if producer is None or producer.op_type != "DequantizeLinear":
            return None
        constants = producer.inputs
        attributes = tuple(sorted((name, value.value) for name, value in producer.attributes.items()))
    if weights.shape is not None and weights.shape.numpy()[1] > WIDEST * weights.shape.numpy()[0]:
        return None
    shapes = []
    for each in constants:
        tensor = each.const_value if each is not None else None
        if tensor is None or each is None or len(each.uses()) > 1:
            return None
        shapes.append((tensor.dtype, *tensor.shape.numpy()[:-1]))
    return (*shapes, *attributes)


def _merge(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    first = nodes[0]
    name = f"{first.outputs[0].name}_merged"
    widths = [_array(_columns(node)).shape[-1] for node in nodes]
    new: list[ir.Node] = []
    producer = None if first.inputs[1] is None else first.inputs[1].producer()
    if producer is None:
        weights = _joined(graph, [node.inputs[1] for node in nodes], f"{name}_weights")
    else:
        producers = [value.producer() for node in nodes if (value := node.inputs[1]) is not None]
        inputs = [
            _joined(
                graph, [each.inputs[at] for each in producers if each is not None], f"{name}_constants_{at}"
            )
            for at in range(len(producer.inputs))
        ]
        weights = ir.val(f"{name}_weights", type=producer.outputs[0].type)
        new.append(ir.node("DequantizeLinear", inputs, dict(producer.attributes), outputs=[weights]))
    product = ir.val(name, type=first.outputs[0].type)
    new.append(ir.node("MatMul", [first.inputs[0], weights], outputs=[product]))
    old = [node.outputs[0] for node in nodes]
    adds = [add for value in old if (add := _bias_of(value))]
    if len(adds) == len(nodes):
        bias = _joined(graph, [each for _, each in adds], f"{name}_bias")
        biased = ir.val(f"{name}_biased", type=first.outputs[0].type)
        new.append(ir.node("Add", [product, bias], outputs=[biased]))
        old = [add.outputs[0] for add, _ in adds]
    sizes = constant(graph, f"{name}_widths", np.array(widths, np.int64))
    split = ir.node("Split", [new[-1].outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes))
    for before, after in zip(old, split.outputs, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
    graph.insert_before(first, [*new, split])
    for before, after in zip(old, split.outputs, strict=True):
        before.name = f"{before.name}_unmerged"
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


def _bias_of(product: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """An Add of a product and a constant [N], which is all that reads the product, and the constant."""
    add = only_user(product, "Add")
    bias = None if add is None else next((value for value in add.inputs if value is not product), None)
    if add is None or bias is None or bias.const_value is None or len(bias.const_value.shape) != 1:
        return None
    # A constant of one element would be added to all columns.
    is_whole = product.shape is None or bias.const_value.shape[0] == product.shape[-1]
    return (add, bias) if is_whole else None


def _columns(node: ir.Node) -> ir.Value:
    """The constant whose last axis is that of a product's columns."""
    weights = node.inputs[1]
    assert weights is not None
    producer = weights.producer()
    codes = weights if producer is None else producer.inputs[0]
    assert codes is not None
    return codes


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None], name: str) -> ir.Value:
    """The constants side by side, along their last axis."""
    arrays = [_array(value) for value in values if value is not None]
    return constant(graph, name, np.ascontiguousarray(np.concatenate(arrays, axis=-1)))


def _array(value: ir.Value) -> NDArray[np.generic]:
    assert value.const_value is not None
    return value.const_value.numpy()
