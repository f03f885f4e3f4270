"""Rounding whose errors later rows make up for: the formula, computed slowly, and what a product gains."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.quantisation.gptq import DAMPING, Moments, gptq, round_products
from export.quantisation.precision import WeightForm
from export.quantisation.quality import CALIBRATION, CALIBRATION_TOKENS, token_ids
from export.quantisation.smoothing import Smoothing
from export.quantisation.weights import QuantizedMatrix, choose_scales, digest, quantize, quantize_products
from export.source import load_source
from tests.export.quantisation.test_quantization import matrix, product_graph

INT4 = WeightForm("int4", 32)
# Five directions that 256 inputs share, and some noise of each: rows of weights can make up for each other.
INPUTS = matrix(600, 5, 1) @ matrix(5, 256, 2) + 0.3 * matrix(600, 256, 3)


def gptq_of(
    weights: NDArray[np.float32], inputs: NDArray[np.float32], form: WeightForm = INT4
) -> QuantizedMatrix:
    return gptq(torch.from_numpy(weights.copy()), Moments.of(torch.from_numpy(inputs)), form, "float32")


@pytest.mark.parametrize("block_size", [32, 128])
def test_errors_are_made_up_for_as_the_formula_says(block_size: int) -> None:
    """Each row with an inverse of its own (Optimal Brain Quantization, equations 2 and 3 of the paper)."""
    form = WeightForm("int4", block_size)
    weights = matrix(256, 48)
    rounded = gptq_of(weights, INPUTS, form)
    left, inputs = weights.astype(np.float64), INPUTS.astype(np.float64)
    squares = inputs.T @ inputs / len(inputs)
    powers = squares.diagonal().copy()
    squares += np.eye(256) * DAMPING * powers.mean()
    expected = np.empty_like(left)
    for row in range(256):
        if row % block_size == 0:
            block = slice(row, row + block_size)
            scales = choose_scales(
                left[None, block].astype(np.float32), form, "float32", powers[block].astype(np.float32)
            )[0].astype(np.float64)
        expected[row] = np.clip(np.rint(left[row] / scales), -8, 7) * scales
        inverse = np.linalg.inv(squares[row:, row:])
        left[row:] -= np.outer(inverse[:, 0] / inverse[0, 0], left[row] - expected[row])
    # A number that lies between two codes may go either way, and what follows goes with it.
    assert (np.abs(rounded.dequantized() - expected).max(0) < 1e-3).mean() > 0.8
    noise, slow = (np.square(INPUTS @ (each - weights)).mean() for each in (rounded.dequantized(), expected))
    assert noise == pytest.approx(slow, rel=0.02)


def test_a_product_has_less_noise_than_by_rounding_to_nearest() -> None:
    weights = matrix(256, 48)
    nearest = quantize(weights, INT4, "float32", np.square(INPUTS).mean(0))
    noise, of_nearest = (
        np.square(INPUTS @ (each.dequantized() - weights)).mean()
        for each in (gptq_of(weights, INPUTS), nearest)
    )
    assert noise < 0.5 * of_nearest


def test_inputs_that_have_nothing_in_common_give_rounding_to_nearest() -> None:
    """Also those that are always zero."""
    weights, scales = matrix(96, 40), np.exp(matrix(1, 96, 5))[0]
    scales[[3, 50]] = 0
    rounded = gptq_of(weights, np.diag(scales))
    nearest = quantize(weights, INT4, "float32", np.square(scales) / 96)
    np.testing.assert_array_equal(rounded.codes, nearest.codes)
    np.testing.assert_array_equal(rounded.scales, nearest.scales)
    nothing = gptq_of(weights, np.zeros((7, 96), np.float32))
    np.testing.assert_array_equal(
        nothing.codes, quantize(weights, INT4, "float32", np.zeros(96, np.float32)).codes
    )


@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
def test_scales_are_of_the_type_that_is_asked_for(scale_dtype: str) -> None:
    rounded = gptq(
        torch.from_numpy(matrix(64, 8)), Moments.of(torch.from_numpy(matrix(9, 64))), INT4, scale_dtype
    )
    assert rounded.scales.dtype.name == scale_dtype
    assert rounded.scales.shape == (2, 8)


def test_all_layers_of_a_model_are_rounded_with_their_inputs(tiny_model_dir: Path) -> None:
    """Layers with smoothed inputs with the moments of these; the LM head stays if it is to be kept."""
    source = load_source(tiny_model_dir, None)
    layers = {
        digest(module.weight.numpy(force=True).T): module
        for module in source.model.modules()
        if isinstance(module, nn.Linear)
    }
    down = digest(source.model.model.layers[1].mlp.down_proj.weight.numpy(force=True).T)
    factors = np.exp(matrix(1, layers[down].in_features, 6))[0]
    smoothing = Smoothing(factors, is_rotated=True)
    rounded = round_products(source, None, INT4, "float32", {down: smoothing})
    assert set(rounded) == set(layers)
    assert rounded[down].smoothing is smoothing
    kept = round_products(source, None, INT4, "float32", {}, other_columns=[source.spec.vocab_size])
    assert len(kept) == len(layers) - 1
    seen: dict[nn.Module, Tensor] = {}

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[module] = inputs[0][0]

    for module in layers.values():
        module.register_forward_pre_hook(record)
    source.model(token_ids(source, CALIBRATION, None, CALIBRATION_TOKENS), use_cache=False)
    for key, module in layers.items():
        weights, inputs = module.weight.numpy(force=True).T, seen[module].numpy(force=True)
        smoothing = rounded[key].smoothing
        powers = np.square(smoothing.of_inputs(inputs)).mean(0)
        nearest = replace(
            quantize(smoothing.of_weights(weights), INT4, "float32", powers), smoothing=smoothing
        )
        noise, of_nearest = (
            np.square(inputs @ (each.dequantized() - weights)).sum() for each in (rounded[key], nearest)
        )
        assert noise < 0.8 * of_nearest


def test_matrices_that_were_rounded_before_are_those_of_the_graph() -> None:
    weights = matrix(64, 8)
    before = gptq_of(weights, matrix(99, 64, 4))
    model = product_graph(weights)
    products = quantize_products(model, INT4, "float32", rounded={digest(weights): before})
    assert products.matrices[digest(weights)] is before
    (codes,) = [v for v in model.graph.initializers.values() if v.name and v.name.endswith("codes")]
    assert codes.const_value is not None
    np.testing.assert_array_equal(codes.const_value.numpy(), before.codes)
