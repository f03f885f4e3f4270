"""Round weights one row after the other, and let later rows make up for the errors of earlier ones.

GPTQ (Frantar et al., arXiv 2210.17323, algorithm 1): with inputs x [K] of a product and H = E[x x^T], what
rounding row k of the weights [K, N] does to the product is made up for by changing the rows after it:

    e = (w_k - rounded(w_k)) / U_kk,    w_j -= U_kj e for j > k,    where H^-1 = U^T U, U upper triangular

The scales of a block of rows are chosen when its first row is reached, of the rows as they are then. H is
measured on a text, after the inputs have been smoothed, and damped.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from export.quantisation.precision import WeightForm
from export.quantisation.quality import CALIBRATION, CALIBRATION_TOKENS, token_ids
from export.quantisation.smoothing import UNSMOOTHED, Smoothing
from export.quantisation.weights import (
    CODES,
    LARGEST_CODE,
    SMALLEST_CODE,
    QuantizedMatrix,
    choose_scales,
    digest,
)
from export.source import Source

# A share of the mean square of all inputs, added to the square of each (the paper's section 3.3, which takes
# 0.01). With the short text of the package, 0.3 changed SmolLM2-135M-Instruct's logits on other texts less
# than 0.01 did.
DAMPING = 0.3
# Of inputs that are all zero.
SMALLEST_DAMPING = 1e-10
# Rows whose errors are carried to all later rows by one product.
ROWS_AT_A_TIME = 32


@torch.no_grad()
def round_products(
    source: Source,
    text: Path | None,
    form: WeightForm,
    scale_dtype: str,
    smoothings: Mapping[str, Smoothing],
    other_columns: Collection[int] = (),
) -> dict[str, QuantizedMatrix]:
    """The weights [K, N] of the target model's linear layers, rounded, by the digests of the originals.

    text: a UTF-8 file; None takes the text that comes with the package
    form: of the weights, in whole numbers
    scale_dtype: the type of the activations
    smoothings: of activations and weights, by the digests of weights
    other_columns: leave weights of so many columns out, which have another form
    The layers read the activations of the model with its original weights. Matrices that no ``nn.Linear``
    holds, such as experts side by side, and those whose rows are no multiple of any block are left out.
    Raises ExportError.
    """
    layers = [
        module
        for module in source.model.modules()
        if isinstance(module, nn.Linear)
        and module.out_features not in (1, *other_columns)
        and form.fitted(module.in_features)
    ]
    ids = token_ids(source, CALIBRATION, text, CALIBRATION_TOKENS)
    rounded: dict[str, QuantizedMatrix] = {}
    read: tuple[Tensor, Smoothing, Moments] | None = None

    def round_weights(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        nonlocal read
        assert isinstance(module, nn.Linear)
        weights = module.weight.numpy().T
        key = digest(weights)
        if key in rounded:
            return
        fitted = form.fitted(len(weights))
        assert fitted is not None
        smoothing = smoothings.get(key, UNSMOOTHED)
        # Layers that share their input and its smoothing, such as those of Q, K and V, follow one another.
        if read is None or read[0] is not inputs[0] or read[1] is not smoothing:
            rows = smoothing.of_inputs(inputs[0].flatten(0, -2).numpy())
            read = inputs[0], smoothing, Moments.of(torch.from_numpy(rows))
        smoothed = torch.from_numpy(smoothing.of_weights(weights).copy())
        rounded[key] = replace(gptq(smoothed, read[2], fitted, scale_dtype), smoothing=smoothing)
        bar.update()

    handles = [layer.register_forward_pre_hook(round_weights) for layer in layers]
    try:
        with tqdm(total=len(layers), desc="rounding weights", unit="matrix", leave=False) as bar:
            source.model.set_attn_implementation("eager")
            source.model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return rounded


@dataclass(frozen=True)
class Moments:
    """What rounding needs to know of a product's inputs x [K].

    powers: float32 [K], E[x_k^2]
    upper: float32 [K, K], upper triangular: U of H^-1 = U^T U, where H = E[x x^T] is damped
    """

    powers: Tensor
    upper: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Moments":
        """Those of inputs [T, K] float32."""
        squares = rows.T @ rows / len(rows)
        powers = squares.diagonal().clone()
        squares.diagonal().add_(max(float(powers.mean()) * DAMPING, SMALLEST_DAMPING))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(squares))
        return cls(powers, torch.linalg.cholesky(inverse, upper=True))


def gptq(weights: Tensor, moments: Moments, form: WeightForm, scale_dtype: str) -> QuantizedMatrix:
    """Round weights [K, N] float32, K a multiple of the form's block, which are overwritten."""
    rows, upper = len(weights), moments.upper
    block = form.block_size or rows
    codes = torch.empty_like(weights)
    errors = torch.empty(min(ROWS_AT_A_TIME, block), weights.shape[1])
    scales = []
    for start in range(0, rows, block):
        stop = start + block
        powers = moments.powers[start:stop].numpy()
        chosen = choose_scales(weights[start:stop].unsqueeze(0).numpy(), form, scale_dtype, powers)
        scales.append(chosen)
        scale = torch.from_numpy(chosen[0].astype(np.float32))
        for first in range(start, stop, len(errors)):
            end = min(first + len(errors), stop)
            for row in range(first, end):
                code = codes[row]
                torch.div(weights[row], scale, out=code).round_()
                code.clamp_(SMALLEST_CODE[form.dtype], LARGEST_CODE[form.dtype])
                error = errors[row - first]
                torch.addcmul(weights[row], code, scale, value=-1, out=error).div_(upper[row, row])
                weights[row + 1 : end].addr_(upper[row, row + 1 : end], error, alpha=-1)
            weights[end:].addmm_(upper[first:end, end:].T, errors[: end - first], alpha=-1)
    stacked = np.concatenate(scales)
    integers = codes.numpy().astype(CODES[form.dtype])
    return QuantizedMatrix(integers, stacked if form.block_size else stacked[0])
