"""PyTorch's exporter to ONNX without work that it does more than once or for nothing.

- ``ExportedProgram.run_decompositions`` traces a program a second time, which takes longer than the first.
  The exporter has ONNX forms of all but a few operators of our programs, so that pass does little: it
  replaces conversions of types, reshapes and a few more. Here they are replaced node by node.
- The pass that makes conversions of types explicit computes the shape of every result once more, although
  the trace has left them in the graph. Here it computes those of the nodes that it changes.
- The table of ONNX forms is made anew for every program. Here it is made once in a process.
- Every rule of the graph's simplification is tried on every node. Here it is tried on those of its kind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from onnxscript.rewriter import RewriteRule
from torch import fx
from torch.export import ExportedProgram
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

aten = torch.ops.aten
# The operators that Python's signs are, under the names that have ONNX forms.
SIGNS = {"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"}
Interpreter = type_promotion._TypePromotionInterpreter
make_registry = cache(ONNXRegistry.from_torchlib)


@contextmanager
def needless_work_left_out(*, trace_again: bool = False) -> Iterator[None]:
    """Let the exporter leave out what it has done before, and what changes nothing.

    trace_again: let programs be traced a second time, for an operator that has an ONNX form only after that
    """
    retrace, run_again = ExportedProgram.run_decompositions, Interpreter.run_node
    rewrite = RewriteRule.try_rewrite

    def decompose(program: ExportedProgram, *arguments: Any, **options: Any) -> ExportedProgram:
        if not trace_again and replace_composites(program):
            return program
        return retrace(program, *arguments, **options)

    def promote_types(interpreter: Any, node: fx.Node) -> Any:
        if node.op != "call_function" or "val" not in node.meta:
            return run_again(interpreter, node)
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule is not None:
            with interpreter._set_current_node(node):
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    def try_on_its_kind(
        rule: RewriteRule, model: ir.Model, graph: ir.Graph, node: ir.Node, **options: Any
    ) -> Any:
        kinds = _kinds(rule)
        if kinds is not None and node.op_type not in kinds:
            return None
        return rewrite(rule, model, graph, node, **options)

    with (
        mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(make_registry)),
        mock.patch.object(RewriteRule, "try_rewrite", try_on_its_kind),
        mock.patch.object(Interpreter, "run_node", promote_types),
        mock.patch.object(ExportedProgram, "run_decompositions", decompose),
    ):
        yield


@cache
def _kinds(rule: RewriteRule) -> set[str] | None:
    """The operators that the last node of a rule's pattern may be; None if it may be any."""
    last = [output.producer() for output in rule._target_pattern.outputs]
    found = [node.op_identifier() if node is not None else None for node in last]
    return {operator[1] for operator in found if operator is not None} if None not in found else None


def replace_composites(program: ExportedProgram) -> bool:
    """Replace composites in place, unless an operator writes into a tensor; returns whether it was done."""
    nodes = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    if any(node.target._schema.is_mutable for node in nodes):
        return False
    # The nodes that compute open sizes, by their symbols.
    sizes: dict[str, fx.Node] = {}
    for node in nodes:
        name = node.target._schema.name
        sign = SIGNS.get(name.removeprefix("aten::"))
        if sign is not None:
            node.target = getattr(getattr(aten, sign), node.target._overloadname)
        elif name == "aten::to":
            _replace_conversion(program, node)
        elif name == "aten::rsub" and len(node.args) == 2:
            node.target, node.args = aten.sub.Tensor, (node.args[1], node.args[0])
        elif name == "aten::chunk":
            _replace_chunks(node)
        elif name == "aten::reshape":
            _view_copy(node, node.args[1])
        elif name in ("aten::flatten", "aten::unflatten"):
            _view_copy(node, _shape_of(node, sizes))
        elif isinstance(node.meta.get("val"), torch.SymInt):
            sizes.setdefault(str(node.meta["val"]), node)
    program.graph.lint()
    return True


def _replace_conversion(program: ExportedProgram, node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    before, after = source.meta["val"], node.meta["val"]
    if before.dtype != after.dtype:
        node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": after.dtype}
        return
    node.replace_all_uses_with(source)
    for output in program.graph_signature.output_specs:
        if output.arg.name == node.name:
            output.arg.name = source.name
    program.graph.erase_node(node)


def _replace_chunks(node: fx.Node) -> None:
    source, count, axis = (*node.args, 0)[:3]
    assert isinstance(source, fx.Node)
    assert isinstance(count, int)
    assert isinstance(axis, int)
    size = source.meta["val"].shape[axis]
    if isinstance(size, int):
        node.target, node.args = aten.split.Tensor, (source, -(-size // count), axis)


def _shape_of(node: fx.Node, sizes: dict[str, fx.Node]) -> list[Any]:
    """The shape of a node's result; an axis that merges others is -1."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    given = [str(size) for size in source.meta["val"].shape]
    shape: list[Any] = []
    for size in node.meta["val"].shape:
        symbol = str(size)
        if isinstance(size, torch.SymInt) and symbol not in sizes and symbol in given:
            with node.graph.inserting_before(node):
                axis = node.graph.call_function(aten.sym_size.int, (source, given.index(symbol)))
            axis.meta["val"] = size
            sizes[symbol] = axis
        shape.append(sizes.get(symbol, -1) if isinstance(size, torch.SymInt) else size)
    return shape


def _view_copy(node: fx.Node, shape: Any) -> None:
    """Let a node view a contiguous copy of its input, which is what the exporter's own pass does."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, (source,), contiguous)
    copy.meta["val"] = source.meta["val"]
    node.target, node.args, node.kwargs = aten._unsafe_view.default, (copy, shape), {}
