"""One ONNX graph put together from smaller ones, which may be used several times.

torch.export needs about 20 ms for an operator whose shapes are open. A graph that does the same again and
again is traced in parts, each once.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

from export.graphs.trace import OPSET
from runtime.core.bundle import GraphSpec, TensorSpec


class JoinedGraph:
    """A graph that grows by copies of others.

    contract: of the whole graph
    inputs: the values of its inputs, by name
    """

    def __init__(self, contract: GraphSpec):
        self.inputs = {
            t.name: ir.Value(name=t.name, shape=ir.Shape(t.shape), type=_type(t)) for t in contract.inputs
        }
        self._contract = contract
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}

    def constant(self, name: str, values: NDArray[np.int64]) -> ir.Value:
        """A tensor of whole numbers."""
        return self._initializer(name, ir.tensor(values.astype(np.int64)))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
        self._initializers[name] = value
        return value

    def append(self, part: ir.Model, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Copy the nodes of a graph, with its inputs by name; returns its outputs."""
        copies: dict[ir.Value, ir.Value] = {}
        for value in part.graph.inputs:
            assert value.name is not None
            copies[value] = inputs[value.name]
        number = len(self._nodes)
        for value in part.graph.initializers.values():
            assert value.const_value is not None
            copies[value] = self._initializer(f"{value.name}_{number}", value.const_value)
        for node in part.graph:
            copy = ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else copies[value] for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=f"{node.op_type}_{len(self._nodes)}",
            )
            for index, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
                copies[old] = new
                new.name, new.type = f"{copy.name}_{index}", old.type
            self._nodes.append(copy)
        return [copies[value] for value in part.graph.outputs]

    def model(self, outputs: Sequence[ir.Value]) -> ir.Model:
        """The graph, in which everything is computed beforehand that follows from constants.

        outputs: in the order of the contract
        """
        for value, tensor in zip(outputs, self._contract.outputs, strict=True):
            value.name, value.shape, value.type = tensor.name, ir.Shape(tensor.shape), _type(tensor)
        graph = ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET},
            name="joined",
        )
        model = ir.Model(graph, ir_version=10)
        fold_constants(model, onnx_shape_inference=True)
        RemoveUnusedNodesPass()(model)
        return model


def _type(tensor: TensorSpec) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(np.dtype(tensor.dtype)))
