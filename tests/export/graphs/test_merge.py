"""Merged products: the same results, and what stays a product of its own."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.graphs.merge import join_heads, merge_products
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
    quantize_products(model, WeightForm("int8", 32), "float32", other_forms={48: None})
    assert merge_products(model) == 1


@pytest.mark.parametrize("biased", ["qkv", "qk"])
def test_biases_are_added_together(biased: str, tmp_path: Path) -> None:
    """Those of all products that are merged; otherwise each part gets its own."""
    model = heads_graph((), biased=biased)
    before = run_heads(model, tmp_path / "before.onnx")
    merge_products(model)
    assert join_heads(model) == (biased == "qkv")
    after = run_heads(model, tmp_path / "after.onnx")
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert Counter(node.op_type for node in model.graph)["Add"] == (1 if biased == "qkv" else 2)


def heads_graph(rotated: tuple[str, ...], shape_of_v: str = "own", biased: str = "") -> ir.Model:
    """Q, K and V of two tokens as heads of 16, of which some are rotated; all are outputs."""
    x = ir.val("x", ir.DataType.FLOAT, [1, 2, 64])
    angles = np.random.default_rng(2).uniform(size=(1, 2, 8)).astype(np.float32)
    constants = {
        "cos": np.cos(angles),
        "sin": np.sin(angles),
        "shape": np.array([1, 2, -1, 16], np.int64),
        "own": np.array([1, 2, 1, 16], np.int64),
        "other": np.array([2, 1, 1, 16], np.int64),
    }
    values = {name: ir.val(name, const_value=ir.tensor(array)) for name, array in constants.items()}
    nodes: list[ir.Node] = []
    outputs = []

    def add(operator: str, name: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        nodes.append(ir.node(operator, inputs, attributes))
        result = nodes[-1].outputs[0]
        result.name, result.type = name, ir.TensorType(ir.DataType.FLOAT)
        return result

    for name, (width, columns) in SHAPES.items():
        weights = np.random.default_rng(columns).normal(size=(width, columns)).astype(np.float32)
        values[name] = ir.val(f"w_{name}", const_value=ir.tensor(weights))
        product = add("MatMul", f"{name}_product", [x, values[name]])
        if name in biased:
            values[f"{name}_bias"] = ir.val(f"{name}_bias", const_value=ir.tensor(weights[0]))
            product = add("Add", f"{name}_biased", [product, values[f"{name}_bias"]])
        shape = values[shape_of_v if name == "v" else "shape"]
        heads = add(
            "Transpose",
            f"{name}_heads",
            [add("Reshape", f"{name}_rows", [product, shape])],
            perm=[0, 2, 1, 3],
        )
        heads.shape = ir.Shape([1, columns // 16, 2, 16])
        if name in rotated:
            heads = add(
                "RotaryEmbedding",
                f"{name}_rotated",
                [heads, values["cos"], values["sin"]],
                num_heads=columns // 16,
            )
        outputs.append(add("Neg", f"{name}_out", [heads]))
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=[*values.values()], opset_imports={"": 24})
    return ir.Model(graph, ir_version=11)


def run_heads(model: ir.Model, path: Path) -> list[NDArray[np.float32]]:
    ir.save(model, path)
    x = np.random.default_rng(1).normal(size=(1, 2, 64)).astype(np.float32)
    found: list[NDArray[np.float32]] = ort.InferenceSession(path).run(None, {"x": x})
    return found


@pytest.mark.parametrize(
    ("rotated", "counts"),
    [
        (("q", "k"), {"Reshape": 1, "Transpose": 1, "RotaryEmbedding": 1, "Split": 2}),
        (("q", "k", "v"), {"Reshape": 1, "Transpose": 1, "RotaryEmbedding": 1, "Split": 1}),
        (("q",), {"Reshape": 1, "Transpose": 1, "RotaryEmbedding": 1, "Split": 2}),
        (("q", "v"), {"Reshape": 1, "Transpose": 1, "RotaryEmbedding": 2, "Split": 1}),
        ((), {"Reshape": 1, "Transpose": 1, "Split": 1}),
    ],
)
def test_heads_are_laid_out_together(
    rotated: tuple[str, ...], counts: dict[str, int], tmp_path: Path
) -> None:
    model = heads_graph(rotated)
    before = run_heads(model, tmp_path / "before.onnx")
    assert merge_products(model) == 2
    assert join_heads(model) == 1
    after = run_heads(model, tmp_path / "after.onnx")
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    found = Counter(node.op_type for node in model.graph)
    assert {name: found[name] for name in counts} == counts


def test_heads_of_other_shapes_stay_apart(tmp_path: Path) -> None:
    model = heads_graph(("q", "k"), "other")
    merge_products(model)
    assert join_heads(model) == 0
