"""Cast a float32 graph to float16 or bfloat16, or only the features that it reads.

Weights, caches and activations get the half type. Some values stay float32, since half a mantissa would show
in the result: the angles of the rotary embedding, statistics of norms that are not fused, and everything
between the last product and an output that the contract declares as float32 (log-probabilities). A fused
RMSNormalization accumulates in float32 by itself (``stash_type`` 1).
"""

import copy
from collections.abc import Iterable

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass

from export.nodes import constant
from export.quantisation.precision import NUMPY_TYPES
from runtime.core.bundle import GraphSpec

IR_TYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
PRODUCTS = ("MatMul", "Gemm", "Attention")
# Operators of norms and of sums of exponentials.
STATISTICS = ("Pow", "ReduceMean", "ReduceSum", "Sqrt", "Reciprocal", "Exp", "Log", "LogSoftmax")


def cast_graph(model: ir.Model, dtype: str, contract: GraphSpec) -> None:
    """Rewrite a float32 graph in place.

    dtype: the type of the graph's activations: float16, bfloat16 or float32
    contract: the tensors of the rewritten graph (``export.quantisation.precision.tensors_in``)
    """
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    _Rewrite(model.graph, dtype, contract).run()
    RemoveUnusedNodesPass()(model)


class _Rewrite:
    def __init__(self, graph: ir.Graph, dtype: str, contract: GraphSpec):
        self._graph = graph
        self._dtype = IR_TYPES[dtype]
        self._numpy_dtype = NUMPY_TYPES[dtype]
        declared = (*contract.inputs, *contract.outputs)
        self._declared = {tensor.name: IR_TYPES.get(tensor.dtype) for tensor in declared}
        # The same value in another type, by name and type.
        self._converted: dict[tuple[str | None, ir.DataType], ir.Value] = {}
        self._exact = _exact_nodes(graph, {t.name for t in contract.outputs if t.dtype == "float32"})

    def run(self) -> None:
        for value in self._graph.inputs:
            declared = self._declared[value.name or ""]
            if value.dtype == ir.DataType.FLOAT and declared is not None:
                value.dtype = declared
        for node in self._graph:
            for value in node.outputs:
                # Merged products share an object, and a change of its type would be that of all their values.
                value.type = copy.copy(value.type)
            _complete_types(node)
        for node in list(self._graph):
            self._rewrite(node)
        for position, value in enumerate(self._graph.outputs):
            declared = self._declared[value.name or ""]
            if declared is not None and value.dtype != declared:
                name, producer = value.name, value.producer()
                assert producer is not None
                value.name = f"{name}_uncast"
                cast = self._cast(value, declared, producer)
                cast.name, cast.shape = name, value.shape
                self._graph.outputs[position] = cast

    def _rewrite(self, node: ir.Node) -> None:
        floats = [v for v in node.inputs if v is not None and _is_float(v)]
        produces_float = any(v.dtype == ir.DataType.FLOAT for v in node.outputs)
        if not floats and not produces_float:
            return
        wanted = ir.DataType.FLOAT if self._stays_exact(node, floats) else self._dtype
        for index, value in enumerate(node.inputs):
            if value is not None and _is_float(value) and value.dtype != wanted:
                node.replace_input_with(index, self._in_type(value, wanted, node))
        if node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT:
            node.attributes["to"] = ir.AttrInt64("to", wanted)
        if node.op_type == "ConstantOfShape" and produces_float:
            given = node.attributes.get("value")
            fill = given.as_tensor().numpy() if given else np.zeros(1, np.float32)
            dtype = fill.dtype if wanted == ir.DataType.FLOAT else self._numpy_dtype
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(fill.astype(dtype)))
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                value.dtype = wanted

    def _stays_exact(self, node: ir.Node, floats: Iterable[ir.Value]) -> bool:
        if node in self._exact or node.op_type in STATISTICS:
            return True
        # What is computed from exact values alone is exact, such as the mean of squares and an epsilon.
        computed = [value for value in floats if not value.is_initializer()]
        return bool(computed) and all(value.dtype == ir.DataType.FLOAT for value in computed)

    def _in_type(self, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
        key = (value.name, dtype)
        if key not in self._converted:
            if value.is_initializer():
                self._converted[key] = self._weight(value)
            else:
                self._converted[key] = self._cast(value, dtype, value.producer() or before)
        return self._converted[key]

    def _weight(self, value: ir.Value) -> ir.Value:
        """A half copy of a weight; the float32 one goes if nothing reads it any more."""
        assert value.const_value is not None
        numbers = _in_range(value.const_value.numpy(), self._numpy_dtype)
        return constant(self._graph, f"{value.name}_{self._numpy_dtype.name}", numbers)

    def _cast(self, value: ir.Value, dtype: ir.DataType, near: ir.Node) -> ir.Value:
        result = ir.val(f"{value.name}_{dtype.name.lower()}", dtype, value.shape)
        node = ir.node("Cast", [value], {"to": dtype}, outputs=[result])
        if near is value.producer():
            self._graph.insert_after(near, node)
        else:
            self._graph.insert_before(near, node)
        return result


def _complete_types(node: ir.Node) -> None:
    """Give outputs without a type the type of the inputs: earlier rewrites leave it out."""
    for value in node.outputs:
        found = [v.dtype for v in node.inputs if v is not None and _is_float(v)]
        if value.dtype is None and found and found[0] is not None:
            value.dtype = found[0]


def _is_float(value: ir.Value) -> bool:
    return value.dtype in IR_TYPES.values()


def _in_range(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    """The nearest numbers of a type; those beyond its range become its largest, not infinite."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(array, -limit, limit).astype(dtype)


def _exact_nodes(graph: ir.Graph, exact_outputs: set[str]) -> set[ir.Node]:
    """The nodes that lead to angles, or lie between the last product and an exact output."""
    exact: set[ir.Node] = set()
    angles = [node for node in graph if node.op_type in ("Cos", "Sin")]
    outputs = [v.producer() for v in graph.outputs if v.name in exact_outputs]
    for found, stops_at_products in ((angles, False), (outputs, True)):
        pending = [node for node in found if node is not None]
        while pending:
            node = pending.pop()
            if node in exact or (stops_at_products and _reads_weights(node)):
                continue
            exact.add(node)
            # Whole numbers, such as the positions of chosen nodes, are exact already.
            numbers = [v for v in node.inputs if v is not None and (v.dtype is None or _is_float(v))]
            pending += [p for p in (v.producer() for v in numbers) if p is not None]
    return exact


def _reads_weights(node: ir.Node) -> bool:
    """Products, and lookups in tables."""
    table = node.inputs[0] if node.op_type.startswith("Gather") else None
    return node.op_type in PRODUCTS or (table is not None and table.is_initializer())
