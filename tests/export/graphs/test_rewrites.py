"""The pass that names a graph's axes, on graphs made by hand."""

import onnx_ir as ir
import pytest

from export.errors import ExportError
from export.graphs.trace import name_axes
from runtime.core.bundle import GraphSpec, TensorSpec

CONTRACT = GraphSpec(
    inputs=(TensorSpec("x", ("B", "A", 4), "float32"), TensorSpec("y", ("B", "T", 4), "float32")),
    outputs=(TensorSpec("z", ("B", "M", 4), "float32"), TensorSpec("state", ("B", "P", 4), "float32")),
)


Shape = tuple[int | str, ...]


def graph(
    x: Shape = ("s0", "s7", 4), y: Shape = ("s1", "s12", 4), z: Shape = ("s0", "s12 + s7", 4)
) -> ir.Model:
    """A model that joins x and y, and writes the result twice."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=name, shape=ir.Shape(shape), type=kind) for name, shape in (("x", x), ("y", y))]
    short = ir.node("Relu", [inputs[1]])
    joined = ir.node("Concat", [inputs[0], short.outputs[0]], {"axis": 1})
    again = ir.node("Identity", [joined.outputs[0]])
    short.outputs[0].shape = ir.Shape(("s1", "Min(6, s12)", None))
    for node, name in ((joined, "z"), (again, "state")):
        node.outputs[0].name, node.outputs[0].shape = name, ir.Shape(z)
    outputs = [joined.outputs[0], again.outputs[0]]
    return ir.Model(
        ir.Graph(inputs, outputs, nodes=[short, joined, again], opset_imports={"": 24}), ir_version=10
    )


def test_every_axis_has_its_name() -> None:
    model = graph()
    name_axes(model, CONTRACT)
    values = (*model.graph.inputs, *model.graph.outputs)
    assert [value.shape for value in values] == [
        tensor.shape for tensor in (*CONTRACT.inputs, *CONTRACT.outputs)
    ]
    assert model.graph[0].outputs[0].shape == ("B", "Min(6, T)", None)


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        ({"x": ("s0", 6, 4)}, "x"),  # fixed in the graph
        ({"x": ("s0", "s7", "s8")}, "x"),  # fixed in the contract
        ({"x": ("s0", "s7", 5)}, "x"),
        ({"y": ("s1", "s7", 4)}, "y"),  # one axis in the graph, two in the contract
        ({"z": ("s0", 9, 4)}, "z"),
    ],
)
def test_an_axis_that_is_not_the_contracts_is_refused(shapes: dict[str, Shape], name: str) -> None:
    with pytest.raises(ExportError, match=rf"^{name}: expected the shape .*, got"):
        name_axes(graph(**shapes), CONTRACT)
