"""Products of int8 activations and int8 weights: exact sums, the same for any rows, and shared files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from export.quantisation import int8_activations
from export.quantisation.int8_activations import (
    Inputs,
    candidates,
    multiply_integers,
    smooth_products,
    write_integer_graph,
)
from export.quantisation.precision import INT8_BLOCKS, WeightForm
from export.quantisation.quality import CALIBRATION, token_ids
from export.quantisation.weights import (
    QuantizedMatrix,
    Smoothing,
    digest,
    hadamard,
    quantize,
    quantize_products,
)
from export.source import load_source
from runtime.engines.ort import adds_in_32_bits, session_options
from tests.export.quantisation.test_quantization import matrix, product_graph

COLUMNS = WeightForm("int8", None)


# Products with signed weights overflow on a processor without VNNI, where no engine computes them.
SIGNS = pytest.mark.parametrize(
    "unsigned", [pytest.param(False, marks=pytest.mark.skipif(not adds_in_32_bits(), reason="no VNNI")), True]
)


def with_open_rows(weights: NDArray[np.float32]) -> ir.Model:
    model = product_graph(weights)
    model.graph.inputs[0].shape = ir.Shape(("M", weights.shape[0]))
    model.graph.outputs[0].shape = ir.Shape(("M", weights.shape[1]))
    return model


def integer_session(
    weights: NDArray[np.float32], smoothing: Smoothing, path: Path, *, unsigned: bool
) -> tuple[ort.InferenceSession, QuantizedMatrix]:
    model = with_open_rows(weights)
    products = quantize_products(model, COLUMNS, "float32", smoothings={digest(weights): smoothing})
    assert multiply_integers(model, unsigned=unsigned) == 1
    ir.save(model, path)
    session = ort.InferenceSession(path, session_options(2, int8_products=True))
    return session, products.matrices[digest(weights)]


def by_hand(x: NDArray[np.float32], quantized: QuantizedMatrix) -> NDArray[np.float64]:
    """The sums of whole numbers, in 64 bits."""
    smoothing = quantized.smoothing
    rows = x if smoothing.factors is None else x * (1 / smoothing.factors)
    if smoothing.is_rotated:
        rows = (rows.reshape(len(x), -1, 64) @ hadamard()).reshape(x.shape)
    largest = np.abs(rows).max(-1, keepdims=True)
    step = np.float32(1 / 127)
    codes = np.rint(np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0) / step)
    sums = codes.astype(np.int64) @ quantized.codes.astype(np.int64)
    return sums * (quantized.scales.astype(np.float64) * float(step)) * largest


FACTORS = np.exp(0.2 * matrix(1, 320, 5)[0])


@pytest.mark.parametrize("smoothing", [Smoothing(), Smoothing(FACTORS), Smoothing(FACTORS, is_rotated=True)])
@SIGNS
def test_sums_are_those_of_whole_numbers(unsigned: bool, smoothing: Smoothing, tmp_path: Path) -> None:
    """Also of the largest codes, which overflow 16 bits when two products are added, and of rows of zeros."""
    weights = matrix(320, 96)
    weights[:, 3] = 2.0
    weights[:, 5] = 0
    session, quantized = integer_session(weights, smoothing, tmp_path / "graph.onnx", unsigned=unsigned)
    x = matrix(9, 320, 1)
    x[2], x[4] = 3.5, 0
    x[6] *= 1e-30
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, by_hand(x, quantized), rtol=3e-6, atol=1e-37)
    assert (found[4] == 0).all()
    expected = (x @ weights)[[0, 1, 3, 5]]
    assert np.abs(found[[0, 1, 3, 5]] - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("is_rotated", [False, True])
@SIGNS
def test_a_row_has_the_same_bits_beside_any_others(unsigned: bool, is_rotated: bool, tmp_path: Path) -> None:
    smoothing = Smoothing(None, is_rotated)
    session, _ = integer_session(matrix(576, 200), smoothing, tmp_path / "graph.onnx", unsigned=unsigned)
    x = matrix(40, 576, 2)
    (together,) = session.run(None, {"x": x})
    for count in (1, 2, 5, 17, 33):
        for start in (0, 3, 40 - count):
            (some,) = session.run(None, {"x": x[start : start + count]})
            np.testing.assert_array_equal(some, together[start : start + count])


@SIGNS
def test_both_forms_share_their_weights(unsigned: bool, tmp_path: Path) -> None:
    weights = matrix(320, 96)
    model = with_open_rows(weights)
    smoothing = Smoothing(np.full(320, 2, np.float32), is_rotated=True)
    quantize_products(model, COLUMNS, "float32", smoothings={digest(weights): smoothing})
    ir.save(model, tmp_path / "graph.onnx", external_data="graph.onnx.data", size_threshold_bytes=256)
    second = tmp_path / "graph.second.onnx"
    write_integer_graph(tmp_path / "graph.onnx", second, unsigned=unsigned)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.onnx", "graph.onnx.data", second.name]
    x = matrix(3, 320, 1)
    plain, integer = (
        ort.InferenceSession(path, session_options(1, int8_products=False)).run(None, {"x": x})[0]
        for path in (tmp_path / "graph.onnx", second)
    )
    assert 0 < np.abs(plain - integer).max() < 0.03 * np.abs(plain).max()


def test_weights_in_blocks_stay_products_of_floats() -> None:
    model = product_graph(matrix(64, 96))
    quantize_products(model, WeightForm("int8", 32), "float32")
    assert multiply_integers(model, unsigned=True) == 0
    assert "com.microsoft" not in model.opset_imports


@pytest.mark.parametrize("rows", [576, 1536])
def test_a_row_has_the_same_bits_beside_any_others_with_scales_for_blocks(rows: int, tmp_path: Path) -> None:
    """ONNX Runtime's product of the blocks that a build takes; with blocks of 128 the last row may differ."""
    model = with_open_rows(matrix(rows, 200))
    form = INT8_BLOCKS.weights
    assert form is not None
    quantize_products(model, form, "float32")
    ir.save(model, tmp_path / "graph.onnx")
    session = ort.InferenceSession(tmp_path / "graph.onnx", session_options(2, int8_products=True))
    x = matrix(40, rows, 2)
    (together,) = session.run(None, {"x": x})
    assert 0 < np.abs(together - x @ matrix(rows, 200)).max() < 0.03 * np.abs(together).max()
    for count in range(1, 34):
        for start in (0, 3, 40 - count):
            (some,) = session.run(None, {"x": x[start : start + count]})
            np.testing.assert_array_equal(some, together[start : start + count])


@pytest.mark.parametrize("outliers", [None, "channels", "numbers"])
def test_the_estimated_noise_is_that_of_rounding(outliers: str | None) -> None:
    """Factors help where the same channels are large in every row, and rotations also where others are."""
    weights, x = matrix(320, 192, 3), matrix(200, 320, 4)
    if outliers == "channels":
        x[:, [7, 100]] *= 40
        weights[[7, 100]] *= 0.1
    if outliers == "numbers":
        x[np.arange(200), np.arange(200) * 7 % 320] = 30
    linear = torch.nn.Linear(320, 192, bias=False)
    linear.weight = torch.nn.Parameter(torch.from_numpy(weights.T.copy()), requires_grad=False)
    rows = torch.from_numpy(x)
    found = candidates(Inputs(rows.abs().amax(0), rows, [linear]))
    exact = x.astype(np.float64) @ weights
    for candidate in found:
        quantized = quantize(candidate.smoothing.apply(weights), COLUMNS, "float32")
        rounded = by_hand(x, replace(quantized, smoothing=candidate.smoothing))
        measured = (np.square(rounded - exact).sum(-1) / np.square(exact).sum(-1)).mean()
        assert candidate.noise == pytest.approx(measured, rel=0.1)
    unrotated = min(each for each in found if not each.smoothing.is_rotated)
    assert (min(found).noise < 0.5 * unrotated.noise) == (outliers == "numbers")


@pytest.mark.parametrize("is_rotated", [False, True])
def test_smoothing_changes_no_product(is_rotated: bool) -> None:
    weights, x = matrix(320, 96), matrix(9, 320, 1)
    smoothing = Smoothing(FACTORS, is_rotated)
    changed = smoothing.apply(weights)
    assert np.abs(changed - weights).max() > 0.5
    np.testing.assert_allclose(smoothing.undo(changed), weights, atol=1e-5)
    model = with_open_rows(weights)
    products = quantize_products(model, COLUMNS, "float32", smoothings={digest(weights): smoothing})
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), session_options(1, int8_products=False)
    )
    (found,) = session.run(None, {"x": x})
    np.testing.assert_allclose(found, x @ products.matrices[digest(weights)].dequantized(), atol=1e-4)


def test_inputs_that_gain_most_are_rotated_until_noise_is_low(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = load_source(tiny_model_dir, None)
    ids = token_ids(source, CALIBRATION, None, int8_activations.CALIBRATION_TOKENS)
    with torch.no_grad():
        groups = int8_activations._inputs_of_products(source.model, ids)
        tried = [candidates(inputs) for inputs in groups]
    unrotated = [min(each for each in found if not each.smoothing.is_rotated) for found in tried]
    gains = [before.noise - min(found).noise for before, found in zip(unrotated, tried, strict=True)]
    total = sum(each.noise for each in unrotated)
    for most, least_gain in ((total, np.inf), (total - max(gains) / 2, max(gains)), (0, 1e-12)):
        monkeypatch.setattr(int8_activations, "MOST_NOISE", most)
        chosen = smooth_products(source, None).smoothings
        for inputs, gain in zip(groups, gains, strict=True):
            for member in inputs.members:
                assert chosen[digest(member.weight.numpy(force=True).T)].is_rotated == (gain >= least_gain)


def test_products_of_one_input_with_other_factors_round_it_apart() -> None:
    """Q, K and V share their rounded input if they have the same factors, and not otherwise."""
    weights = [matrix(320, 96, seed) for seed in range(3)]
    model = with_open_rows(weights[0])
    graph = model.graph
    for number, more in enumerate(weights[1:]):
        constant = ir.val(f"w{number}", const_value=ir.tensor(more))
        graph.register_initializer(constant)
        node = ir.node("MatMul", [graph.inputs[0], constant])
        node.outputs[0].name, node.outputs[0].dtype = f"y{number}", ir.DataType.FLOAT
        node.outputs[0].shape = ir.Shape(("M", 96))
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    smoothings = [Smoothing(FACTORS, True), Smoothing(FACTORS, True), Smoothing(FACTORS[::-1].copy(), True)]
    given = {digest(each): smoothing for each, smoothing in zip(weights, smoothings, strict=True)}
    products = quantize_products(model, COLUMNS, "float32", smoothings=given)
    assert sum("hadamard" in [value.name for value in node.inputs if value] for node in graph) == 2
    x = matrix(9, 320, 1)
    options = session_options(1, int8_products=False)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    for found, each in zip(session.run(None, {"x": x}), weights, strict=True):
        np.testing.assert_allclose(found, x @ products.matrices[digest(each)].dequantized(), atol=1e-4)
