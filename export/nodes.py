"""Parts of a graph that are looked for, and what takes their places."""

from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray


def input_of(node: ir.Node | None, index: int) -> ir.Value | None:
    """An input of a node; None without the node or the input."""
    return None if node is None or len(node.inputs) <= index else node.inputs[index]


def producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """The node that makes a value, if it is such an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == operator else None


def user(value: ir.Value, operator: str, index: int) -> ir.Node | None:
    """The operator that reads a value as its input ``index``, if there is exactly one."""
    found = [use.node for use in value.uses() if use.idx == index and use.node.op_type == operator]
    return found[0] if len(found) == 1 else None


def only_user(value: ir.Value, operator: str) -> ir.Node | None:
    """The node that reads a value, if it is the only one and such an operator."""
    found = [use.node for use in value.uses()]
    is_one = len(found) == 1 and not value.is_graph_output()
    return found[0] if is_one and found[0].op_type == operator else None


def number(value: ir.Value | None) -> float | None:
    """The content of a constant of one element."""
    constant = None if value is None else value.const_value
    return float(constant.numpy()) if constant is not None and constant.size == 1 else None


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """A new constant of a graph."""
    value = ir.val(name, const_value=ir.tensor(array))
    graph.register_initializer(value)
    return value


def take_places(graph: ir.Graph, after: ir.Node, node: ir.Node, places: list[ir.Value]) -> None:
    """Insert a node whose outputs take the places, and the names, of other values."""
    for old, new in zip(places, node.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        name, old.name = old.name, f"{old.name}_apart"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
    graph.insert_after(after, node)
