"""Smoothing before weights and activations are rounded: no product changes, and rounding adds less noise."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from export.quantisation.choose_smoothing import (
    MOST_NOISE,
    Inputs,
    candidates,
    inputs_of_products,
    smooth_products,
)
from export.quantisation.precision import WeightForm
from export.quantisation.quality import CALIBRATION, CALIBRATION_TOKENS, token_ids
from export.quantisation.smoothing import Smoothing, hadamard, previous_layers
from export.quantisation.weights import digest, quantize, quantize_products
from export.source import load_source
from runtime.engines.ort import session_options
from tests.export.quantisation.test_int8_products import COLUMNS, FACTORS, with_open_rows
from tests.export.quantisation.test_quantization import matrix


def rounded_rows(x: NDArray[np.float32], smoothing: Smoothing, block_size: int | None) -> NDArray[np.float32]:
    """What an engine multiplies by smoothed weights."""
    rows = x if smoothing.factors is None else x / smoothing.factors
    if smoothing.is_rotated:
        rows = (rows.reshape(len(x), -1, 64) @ hadamard()).reshape(x.shape)
    blocks = rows.reshape(len(x), -1, block_size or x.shape[1])
    scales = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / scales) * scales).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize("form", [COLUMNS, WeightForm("int4", 32)])
@pytest.mark.parametrize("outliers", [None, "channels", "numbers"])
def test_the_noise_is_that_of_rounding(outliers: str | None, form: WeightForm) -> None:
    """Factors help where the same channels are large in every row, and rotations also where others are."""
    weights, x = matrix(320, 192, 3), matrix(200, 320, 4)
    if outliers == "channels":
        x[:, [7, 100]] *= 40
        weights[[7, 100]] *= 0.1
    if outliers == "numbers":
        x[np.arange(200), np.arange(200) * 7 % 320] = 30
    linear = torch.nn.Linear(320, 192, bias=False)
    linear.weight = torch.nn.Parameter(torch.from_numpy(weights.T.copy()), requires_grad=False)
    found = candidates(Inputs(np.sqrt(np.square(x).mean(0)), x, [linear]), form)
    exact = x.astype(np.float64) @ weights
    for candidate in found:
        powers = np.square(candidate.smoothing.of_inputs(x)).mean(0)
        codes = quantize(candidate.smoothing.of_weights(weights), form, "float32", powers).dequantized()
        rounded = rounded_rows(x, candidate.smoothing, form.block_size) @ codes
        noise = (np.square(rounded - exact).sum(-1) / np.square(exact).sum(-1)).mean()
        assert candidate.noise == pytest.approx(noise, rel=0.01)
    plain = next(each for each in found if each.smoothing.factors is None and not each.smoothing.is_rotated)
    unrotated = min(each for each in found if not each.smoothing.is_rotated)
    if outliers == "channels":
        assert unrotated.noise < 0.8 * plain.noise
    if form == COLUMNS:
        assert (min(found).noise < 0.5 * unrotated.noise) == (outliers == "numbers")


@pytest.mark.parametrize("is_rotated", [False, True])
def test_smoothing_changes_no_product(is_rotated: bool) -> None:
    weights, x = matrix(320, 96), matrix(9, 320, 1)
    smoothing = Smoothing(FACTORS, is_rotated)
    changed = smoothing.of_weights(weights)
    assert np.abs(changed - weights).max() > 0.5
    np.testing.assert_allclose(smoothing.original_weights(changed), weights, atol=1e-5)
    rows = smoothing.of_inputs(x)
    np.testing.assert_allclose(smoothing.original_inputs(rows), x, atol=1e-5)
    np.testing.assert_allclose(rows @ changed, x @ weights, atol=1e-4)
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
    ids = token_ids(source, CALIBRATION, None, CALIBRATION_TOKENS)
    known = previous_layers(source.model)
    with torch.no_grad():
        groups = inputs_of_products(source.model, ids)
        tried = [candidates(inputs, COLUMNS, known.get(inputs.members[0])) for inputs in groups]
    unrotated = [min(each for each in found if not each.smoothing.is_rotated) for found in tried]
    gains = [before.noise - min(found).noise for before, found in zip(unrotated, tried, strict=True)]
    total = sum(each.noise for each in unrotated)
    for most, least_gain in ((total, np.inf), (total - max(gains) / 2, max(gains)), (0, 1e-12)):
        monkeypatch.setitem(MOST_NOISE, "int8", most)
        smoothed = smooth_products(load_source(tiny_model_dir, None), None, COLUMNS)
        chosen = [smoothed.smoothings[key].is_rotated for _, key in smoothed.modules]
        members = [len(inputs.members) for inputs in groups]
        assert chosen == np.repeat(np.array(gains) >= least_gain, members).tolist()


def test_products_with_one_smoothing_share_their_input() -> None:
    """Q, K and V share their smoothed input, and products with another smoothing have one of their own."""
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
    shared = Smoothing(FACTORS, is_rotated=True)
    smoothings = [shared, shared, Smoothing(FACTORS[::-1].copy(), is_rotated=True)]
    given = {digest(each): smoothing for each, smoothing in zip(weights, smoothings, strict=True)}
    products = quantize_products(model, COLUMNS, "float32", smoothings=given)
    assert sum("hadamard" in [value.name for value in node.inputs if value] for node in graph) == 2
    x = matrix(9, 320, 1)
    options = session_options(1, int8_products=False)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    for found, each in zip(session.run(None, {"x": x}), weights, strict=True):
        np.testing.assert_allclose(found, x @ products.matrices[digest(each)].dequantized(), atol=1e-4)
