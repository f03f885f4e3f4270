"""Products with the same rows become one product: Q, K and V of a layer, or gate and up of an MLP.

A product of few rows takes a time of its own besides its arithmetic: threads are woken, rows are rounded to
int8. SmolLM2-135M has 211 products with weights, and 121 after this. Every column has the sum that it had.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

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
    for constant in constants:
        tensor = constant.const_value if constant is not None else None
        if tensor is None or constant is None or len(constant.uses()) > 1:
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
        new.append(ir.node("DequantizeLinear", inputs, dict(producer.attributes)))
        weights = new[0].outputs[0]
        weights.name, weights.type = f"{name}_weights", producer.outputs[0].type
    product = ir.node("MatMul", [first.inputs[0], weights])
    product.outputs[0].name, product.outputs[0].type = name, first.outputs[0].type
    sizes = ir.val(f"{name}_widths", const_value=ir.tensor(np.array(widths, np.int64)))
    graph.register_initializer(sizes)
    split = ir.node("Split", [product.outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes))
    old = [node.outputs[0] for node in nodes]
    for before, after in zip(old, split.outputs, strict=True):
        after.name, after.type, after.shape = before.name, before.type, before.shape
    graph.insert_before(first, [*new, product, split])
    for before, after in zip(old, split.outputs, strict=True):
        before.name = f"{before.name}_unmerged"
        ir.convenience.replace_all_uses_with(before, after, replace_graph_outputs=True)


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
    joined = ir.val(name, const_value=ir.tensor(np.ascontiguousarray(np.concatenate(arrays, axis=-1))))
    graph.register_initializer(joined)
    return joined


def _array(value: ir.Value) -> NDArray[np.generic]:
    assert value.const_value is not None
    return value.const_value.numpy()
