"""Products of int8 activations and int8 weights: exact sums, the same for any rows, and shared files."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from export.quantisation.int8_activations import multiply_integers, write_integer_graph
from export.quantisation.precision import INT8_BLOCKS, WeightForm
from export.quantisation.smoothing import Smoothing
from export.quantisation.weights import (
    QuantizedMatrix,
    digest,
    quantize_products,
)
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
    rows = quantized.smoothing.of_inputs(x)
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
