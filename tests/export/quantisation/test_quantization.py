"""Quantised weights: the codes, the graphs that they give, and the same rounding of torch modules."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from export.errors import ExportError
from export.quantisation.precision import WeightForm
from export.quantisation.weights import (
    LARGEST_CODE,
    SMALLEST_CODE,
    Rounded,
    digest,
    quantize,
    quantize_embedding,
    quantize_products,
    round_parameters,
)
from runtime.engines.ort import session_options

FORMS = [WeightForm(dtype, block) for dtype in ("int4", "int8", "fp8") for block in (32, None)]


def matrix(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(1, 3),
    columns=st.integers(1, 5),
    exponent=st.floats(-20, 20),
)
def test_error_is_at_most_half_a_scale(
    dtype: str, seed: int, blocks: int, columns: int, exponent: float
) -> None:
    """But for numbers that int4 cuts off, which have the last code."""
    weights = matrix(32 * blocks, columns, seed) * np.float32(math.pow(10, exponent))
    rounded = quantize(weights, WeightForm(dtype, 32), "float32")
    assert rounded.scales.shape == (blocks, columns)
    codes = rounded.codes.astype(np.int32)
    last = {LARGEST_CODE[dtype], SMALLEST_CODE[dtype]}
    assert {codes.max(), codes.min()} & last
    scales = np.repeat(rounded.scales.astype(np.float32), 32, axis=0)
    is_near = np.abs(rounded.dequantized() - weights) <= scales * np.float32(0.5001)
    assert is_near[~np.isin(codes, list(last))].all()
    assert dtype == "int4" or is_near.all()


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e30])
def test_scales_may_be_numbers_of_half_precision(dtype: str, size: float) -> None:
    """Also beyond its range, and for a block of zeros."""
    weights = matrix(64, 5) * np.float32(size)
    weights[:32, 0] = 0
    rounded = quantize(weights, WeightForm(dtype, 32, "float16"), "float32")
    assert rounded.scales.dtype == np.float32
    scales = rounded.scales.astype(np.float32)
    assert (scales == scales.astype(np.float16)).all()
    assert (scales > 0).all()
    if size == 1.0:
        exact = quantize(weights, WeightForm(dtype, 32), "float32").scales.astype(np.float32)
        np.testing.assert_allclose(scales, exact, rtol=1e-3)


def test_a_matrix_has_the_largest_blocks_that_its_rows_allow() -> None:
    form = WeightForm("int4", 128)
    for rows, num_blocks in ((256, 2), (192, 3), (96, 3)):
        model = product_graph(matrix(rows, 8))
        (found,) = quantize_products(model, form, "float32").matrices.values()
        assert found.scales.shape == (num_blocks, 8)
        (block_size,) = [node.attributes["block_size"].value for node in model.graph if len(node.attributes)]
        assert block_size == rows / num_blocks
    assert form.fitted(40) is None
    assert WeightForm("int4", 32).fitted(256) == WeightForm("int4", 32)
    assert WeightForm("int8", None).fitted(31) == WeightForm("int8", None)


@pytest.mark.parametrize("has_powers", [False, True])
def test_scales_of_int4_have_the_least_error(has_powers: bool) -> None:
    """Of those that are tried, weighted by what the rows of the weights are multiplied with."""
    weights = matrix(96, 40, 7)
    powers = np.exp(matrix(96, 1, 8)[:, 0] * 2) if has_powers else None
    rounded = quantize(weights, WeightForm("int4", 32), "float32", powers)
    blocks = weights.astype(np.float64).reshape(3, 32, 40)
    weight = np.ones((3, 32, 1)) if powers is None else powers.reshape(3, 32, 1)

    def errors(scales: NDArray[np.float64]) -> NDArray[np.float64]:
        codes = np.clip(np.rint(blocks / scales[:, None]), -8, 7)
        return ((codes * scales[:, None] - blocks) ** 2 * weight).sum(1)

    reach = np.maximum(blocks.max(1) / 7, -blocks.min(1) / 8)
    tried = np.array([errors(reach * share) for share in np.linspace(0.7, 1, 12)])
    found = errors(rounded.scales.astype(np.float64))
    np.testing.assert_allclose(found, tried.min(0), rtol=1e-4)
    assert found.sum() < 0.95 * tried[-1].sum()
    np.testing.assert_allclose(
        ((rounded.dequantized() - weights).reshape(3, 32, 40) ** 2 * weight).sum(1), found, rtol=1e-4
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale_dtype", ["float32", "float16", "bfloat16"])
def test_what_the_codes_can_represent_is_exact(form: WeightForm, scale_dtype: str) -> None:
    """Also zeros, and blocks of zeros, in any type of scales."""
    largest = LARGEST_CODE[form.dtype]
    codes = np.random.default_rng(0).integers(-7, 8, (64, 6))
    codes[::32] = largest
    weights = (codes * 0.125).astype(np.float32)
    weights[:, 2] = 0
    rounded = quantize(weights, form, scale_dtype)
    assert rounded.scales.dtype.name == scale_dtype
    np.testing.assert_array_equal(rounded.dequantized(), weights)


@pytest.mark.parametrize("form", FORMS)
def test_products_with_zeros_are_no_subnormal_numbers(form: WeightForm) -> None:
    """Some processors multiply those a hundred times slower."""
    scales = quantize(np.zeros((64, 2), np.float32), form, "float32").scales
    assert (scales.astype(np.float32) * np.float32(1e-6) > np.finfo(np.float32).smallest_normal).all()


@pytest.mark.parametrize("form", FORMS)
def test_rounding_again_changes_nothing(form: WeightForm) -> None:
    once = quantize(matrix(64, 5), form, "float32").dequantized()
    np.testing.assert_allclose(quantize(once, form, "float32").dequantized(), once, rtol=1e-6)


def product_graph(weights: NDArray[np.float32]) -> ir.Model:
    """x times a weight [K, N]."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", shape=ir.Shape((3, weights.shape[0])), type=kind)
    weight = ir.val("w", const_value=ir.tensor(weights, name="w"))
    product = ir.node("MatMul", [x, weight])
    product.outputs[0].name, product.outputs[0].type = "y", kind
    product.outputs[0].shape = ir.Shape((3, weights.shape[1]))
    graph = ir.Graph(
        [x], [product.outputs[0]], nodes=[product], initializers=[weight], opset_imports={"": 24}
    )
    return ir.Model(graph, ir_version=11)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_products_with_rounded_weights(dtype: str, exact: bool, tmp_path: Path) -> None:
    """As ONNX Runtime computes them for a target model and for a head."""
    weights = matrix(64, 96)
    model = product_graph(weights)
    products = quantize_products(model, WeightForm(dtype, 32), "float32")
    assert (len(products.matrices), products.num_partial) == (1, 0)
    ir.save(model, tmp_path / "graph.onnx")
    options = session_options(1, int8_products=not exact)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    session = ort.InferenceSession(tmp_path / "graph.onnx", options)
    x = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    expected = products.matrices[digest(weights)].dequantized()
    found = session.run(None, {"x": x})[0]
    tolerance = 1e-5 if exact else 5e-2
    np.testing.assert_allclose(found, x @ expected, rtol=0, atol=tolerance * np.abs(x @ expected).max())
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operators == (["MatMul"] if exact else ["MatMulNBits"])


def test_which_weights_stay() -> None:
    """Partial blocks, single columns, and the LM head where asked for."""
    blocks = WeightForm("int8", 32)
    partial = quantize_products(product_graph(matrix(48, 64)), blocks, "float32")
    assert (partial.matrices, partial.num_partial) == ({}, 1)
    assert not quantize_products(product_graph(matrix(64, 1)), blocks, "float32").matrices
    lm_head = product_graph(matrix(64, 96))
    assert not quantize_products(lm_head, blocks, "float32", other_forms={96: None}).matrices
    assert quantize_products(lm_head, blocks, "float32", other_forms={64: None}).matrices


def test_matrices_of_so_many_columns_have_a_form_of_their_own() -> None:
    lm_head = matrix(64, 96)
    forms: dict[int, WeightForm | None] = {96: WeightForm("int8", 32)}
    (found,) = quantize_products(
        product_graph(lm_head), FORMS[0], "float32", other_forms=forms
    ).matrices.values()
    assert found.codes.dtype == np.int8
    np.testing.assert_allclose(found.dequantized(), lm_head, atol=np.abs(lm_head).max() / 127)


def test_parameters_are_rounded_wherever_they_are() -> None:
    """A linear layer, experts apart and side by side, and a table that is a product's weight too."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(96, 64)
            self.tied = nn.Linear(64, 96, bias=False)
            self.tied.weight = self.embedding.weight
            self.experts = nn.Parameter(torch.randn(2, 96, 64))
            self.gates = nn.Parameter(torch.randn(2, 32, 64))
            self.down = nn.Parameter(torch.randn(2, 96, 32))
            self.other = nn.Parameter(torch.randn(96, 64))

    torch.manual_seed(0)
    module = Module()
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    table = before["embedding.weight"].numpy().T
    gates = before["gates"].flatten(0, 1).numpy().T
    down = before["down"].transpose(0, 1).flatten(1).numpy().T
    stacks = [*before["experts"].mT.numpy(), gates, down]
    form = WeightForm("int4", 32)
    matrices = {digest(each): quantize(each, form, "float32") for each in (table, *stacks)}
    tables = {digest(table): quantize(table, WeightForm("int8", None), "float32")}
    round_parameters(module, Rounded(matrices, tables))
    after = {name: value.numpy() for name, value in module.state_dict().items()}
    np.testing.assert_array_equal(after["tied.weight"].T, matrices[digest(table)].dequantized())
    np.testing.assert_array_equal(after["embedding.weight"].T, tables[digest(table)].dequantized())
    found_gates = after["gates"].reshape(64, 64).T
    found_down = after["down"].swapaxes(0, 1).reshape(96, 64).T
    for found, key in zip([*after["experts"].swapaxes(1, 2), found_gates, found_down], stacks, strict=True):
        np.testing.assert_array_equal(found, matrices[digest(key)].dequantized())
    np.testing.assert_array_equal(after["other"], before["other"].numpy())
    with pytest.raises(ExportError, match="1 quantised matrices are no parameters of the model"):
        round_parameters(module, Rounded({digest(matrix(64, 64)): quantize(matrix(64, 64), form, "float32")}))


def test_embedding_is_looked_up_in_codes() -> None:
    kind = ir.TensorType(ir.DataType.FLOAT)
    ids = ir.Value(name="ids", shape=ir.Shape(("N",)), type=ir.TensorType(ir.DataType.INT64))
    table = ir.val("table", const_value=ir.tensor(matrix(10, 6), name="table"))
    gather = ir.node("Gather", [table, ids], {"axis": 0})
    gather.outputs[0].name, gather.outputs[0].type, gather.outputs[0].shape = "rows", kind, ir.Shape(("N", 6))
    graph = ir.Graph([ids], [gather.outputs[0]], nodes=[gather], initializers=[table], opset_imports={"": 24})
    model = ir.Model(graph, ir_version=11)
    # A transition's tables may have the shape of the embedding.
    assert quantize_embedding(model, matrix(10, 6) + 1, "float32") == {}
    (rounded,) = quantize_embedding(model, matrix(10, 6), "float32").values()
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    rows = session.run(None, {"ids": np.array([7, 0, 7])})[0]
    np.testing.assert_array_equal(rows, rounded.dequantized().T[[7, 0, 7]])
    assert {value.dtype for value in graph.initializers.values()} == {ir.DataType.INT8, ir.DataType.FLOAT}
    assert "table" not in graph.initializers
