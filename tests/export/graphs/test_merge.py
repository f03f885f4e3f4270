"""Merged products: the same results, and what stays a product of its own."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.graphs.merge import merge_products
from export.quantisation.precision import WeightForm
from export.quantisation.weights import quantize_products

RANDOM = np.random.default_rng(0)
SHAPES = {"q": (64, 48), "k": (64, 16), "v": (64, 16)}


def graph_of(weights: dict[str, NDArray[np.float32]], *, shared: bool = False) -> ir.Model:
    """Products of x with every matrix, which are all outputs; q goes through a Relu first."""
    x = ir.val("x", ir.DataType.FLOAT, ["N", 64])
    values = {name: ir.val(f"w_{name}", const_value=ir.tensor(array)) for name, array in weights.items()}
    nodes: list[ir.Node] = []
    outputs: list[ir.Value] = []
    for name in (*values, *(["q"] if shared else [])):
        product = ir.node("MatMul", [x, values[name]])
        product.outputs[0].name = f"{name}{len(nodes)}"
        product.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        nodes.append(product)
        if name == "q":
            nodes.append(ir.node("Relu", [product.outputs[0]]))
            nodes[-1].outputs[0].name = f"relu{len(nodes)}"
            nodes[-1].outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        outputs.append(nodes[-1].outputs[0])
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[*values.values()], opset_imports={"": 24})
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, path: Path, rows: int) -> list[NDArray[np.float32]]:
    ir.save(model, path)
    x = np.random.default_rng(1).normal(size=(rows, 64)).astype(np.float32)
    found: list[NDArray[np.float32]] = ort.InferenceSession(path).run(None, {"x": x})
    return found


@pytest.mark.parametrize("form", [None, WeightForm("int8", 32), WeightForm("int4", 32)])
@pytest.mark.parametrize("rows", [1, 5])
def test_results_stay(form: WeightForm | None, rows: int, tmp_path: Path) -> None:
    weights = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    model = graph_of(weights)
    if form:
        quantize_products(model, form, "float32")
    names = [value.name for value in model.graph.outputs]
    before = run(model, tmp_path / "before.onnx", rows)
    assert merge_products(model) == 2
    assert [value.name for value in model.graph.outputs] == names
    after = run(model, tmp_path / "after.onnx", rows)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "after.onnx").graph.node)
    assert kinds == {"MatMul": 1, "Split": 1, "Relu": 1} | ({"DequantizeLinear": 1} if form else {})


def test_a_matrix_of_several_products_stays() -> None:
    weights = {name: RANDOM.normal(size=SHAPES[name]).astype(np.float32) for name in ("q", "k")}
    assert merge_products(graph_of(weights, shared=True)) == 0


def test_other_forms_are_not_merged() -> None:
    """Rows of another number have another input, so this is about matrices in different precisions."""
    weights = {name: RANDOM.normal(size=SHAPES[name]).astype(np.float32) for name in ("q", "k", "v")}
    model = graph_of(weights)
    quantize_products(model, WeightForm("int8", 32), "float32", skip_columns=48)
    assert merge_products(model) == 1
