"""Smoothing of weights and activations, so that a few large numbers do not take the bits of all others.

Engines round the activations of a row to int8, with one scale or one for each block, and weights to int8 or
int4. A few channels of activations are much larger than the others. They are divided by a factor, and their
weights multiplied by it, which changes no product (as in SmoothQuant: Xiao et al., arXiv 2211.10438,
equation 4, and AWQ: Lin et al., arXiv 2306.00978; here of root mean squares, which say more of noise than the
largest magnitudes do). What is large in one row alone has no such channel. A Hadamard matrix spreads it over
64 neighbours, and the weights are rotated likewise (QuaRot: Ashkboos et al., arXiv 2404.00456).

The exponent alpha of the factors is chosen for each input of products, by the noise that rounding adds to
their results on a text. Noise of one layer adds to that of the next, so where a model has much of it, the
inputs that gain most are rotated, too.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from export.quantisation.precision import WeightForm
from export.quantisation.quality import CALIBRATION, token_ids
from export.quantisation.weights import ROTATED, Smoothing, digest, hadamard, quantize
from export.source import Source

# As many tokens as the text of the package has with a small vocabulary.
CALIBRATION_TOKENS = 2048
# By so many of them, and so many columns of the weights, noise is measured.
SAMPLED_ROWS, SAMPLED_COLUMNS = 256, 256
# Of activations.
LARGEST_CODE = 127
# A channel that the text never uses, or that no weight reads, has a factor nevertheless.
SMALLEST = 1e-5
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# The noise of a model's products, each as a share of its power, summed: inputs are rotated until there is no
# more, by the type of the weights. SmolLM2-135M-Instruct has more in its 30 layers. The demo's model has less
# in its 6: it gains nothing by rotations, and takes a tenth longer with them.
MOST_NOISE = {"int8": 0.0145, "int4": 0.3}


@dataclass(frozen=True)
class SmoothedProducts:
    """How the products of a model are smoothed.

    smoothings: by the digest of a weight [K, N]
    modules: the module of every such product, with the digest of its weight
    """

    smoothings: Mapping[str, Smoothing]
    modules: tuple[tuple[nn.Linear, str], ...]

    @contextmanager
    def rounding_activations(self, quantized: Collection[str]) -> Iterator[None]:
        """Let modules round their activations as products of whole numbers do: with one scale for a row.

        quantized: the digests of the weights that were quantised
        """

        def hook(smoothing: Smoothing) -> Callable[..., tuple[Any, ...]]:
            return lambda _, inputs: (_rounded_rows(inputs[0], smoothing), *inputs[1:])

        handles = [
            module.register_forward_pre_hook(hook(self.smoothings[key]))
            for module, key in self.modules
            if key in quantized
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def smooth_products(source: Source, text: Path | None, form: WeightForm) -> SmoothedProducts:
    """How the linear layers of the target model are smoothed, by its activations on a text.

    text: a UTF-8 file; None takes the text that comes with the package
    form: of the weights
    Matrices that no ``nn.Linear`` holds, such as experts side by side, are not smoothed. Neither are those
    whose rows are no multiple of a block, because they are not quantised. Raises ExportError.
    """
    ids = token_ids(source, CALIBRATION, text, CALIBRATION_TOKENS)
    groups = [
        inputs
        for inputs in inputs_of_products(source.model, ids)
        if not len(inputs.rms) % (form.block_size or 1)
    ]
    tried = [candidates(inputs, form) for inputs in groups]
    chosen = [min(each for each in found if not each.smoothing.is_rotated) for found in tried]
    gains = [of_group.noise - min(found).noise for of_group, found in zip(chosen, tried, strict=True)]
    total = sum(each.noise for each in chosen)
    for index in sorted(range(len(groups)), key=lambda index: -gains[index]):
        if total <= MOST_NOISE[form.dtype]:
            break
        chosen[index] = min(tried[index])
        total -= gains[index]
    smoothings: dict[str, Smoothing] = {}
    modules: list[tuple[nn.Linear, str]] = []
    for inputs, candidate in zip(groups, chosen, strict=True):
        keys = [digest(member.weight.numpy().T) for member in inputs.members]
        smoothings.update(dict.fromkeys(keys, candidate.smoothing))
        modules += zip(inputs.members, keys, strict=True)
    return SmoothedProducts(smoothings, tuple(modules))


@dataclass
class Inputs:
    """The activations that some linear layers read, such as those of Q, K and V.

    rms: the root mean square [K] of every channel
    rows: a sample [T, K] of the activations
    """

    rms: Tensor
    rows: Tensor
    members: list[nn.Linear]


def inputs_of_products(model: Any, ids: Tensor) -> list[Inputs]:
    """Those of every linear layer, on a text of token ids [1, L]."""
    groups: list[Inputs] = []
    read: list[Tensor] = []
    seen: set[int] = set()

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Linear)
        hidden = inputs[0]
        if id(module) in seen:
            return
        seen.add(id(module))
        # Layers that share their input, such as those of Q, K and V, are called one after the other.
        if not read or read[-1] is not hidden:
            read[:] = [hidden]
            rows = hidden.detach().flatten(0, -2)
            groups.append(Inputs(_rms(rows), _sample(rows, SAMPLED_ROWS).clone(), []))
        groups[-1].members.append(module)

    handles = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return groups


def _rms(rows: Tensor) -> Tensor:
    return rows.square().mean(0).sqrt().clamp(min=SMALLEST)


def _sample(rows: Tensor, count: int) -> Tensor:
    """At most so many rows, evenly spread."""
    return rows[:: max(1, len(rows) // count)][:count]


@dataclass(frozen=True, order=True)
class Candidate:
    """A smoothing, and the noise that rounding adds to products after it, as a share of their power."""

    noise: float
    smoothing: Smoothing = field(compare=False)


def candidates(inputs: Inputs, form: WeightForm) -> list[Candidate]:
    """Every smoothing that is tried for some products, by the noise of a sample.

    form: of the weights; activations have scales for blocks of the same size
    """
    weights = torch.cat([member.weight for member in inputs.members])
    rms_of_weights = _rms(weights)
    columns = np.ascontiguousarray(_sample(weights, SAMPLED_COLUMNS).numpy().T)
    exact = inputs.rows @ torch.from_numpy(columns)
    power = exact.square().sum(-1).clamp(min=torch.finfo(exact.dtype).tiny)
    found = []
    for alpha, is_rotated in product((None, *ALPHAS), (False, True)):
        if is_rotated and len(columns) % ROTATED:
            continue
        smoothing = Smoothing(None, is_rotated)
        if alpha is not None:
            factors = inputs.rms**alpha / rms_of_weights ** (1 - alpha)
            smoothing = Smoothing(factors.float().numpy(), is_rotated)
        rounded = smoothing.undo(quantize(smoothing.apply(columns), form, "float32").dequantized())
        rows = _rounded_rows(inputs.rows, smoothing, form.block_size)
        errors = (rows @ torch.from_numpy(rounded) - exact).square().sum(-1)
        found.append(Candidate(float((errors / power).mean()), smoothing))
    return found


def _rotated(rows: Tensor) -> Tensor:
    """[..., K], every 64 neighbours multiplied by the Hadamard matrix."""
    return (rows.unflatten(-1, (-1, ROTATED)) @ torch.from_numpy(hadamard())).flatten(-2)


def _rounded_rows(hidden: Tensor, smoothing: Smoothing, block_size: int | None = None) -> Tensor:
    """Activations [..., K] after they were smoothed, rounded to int8, and the smoothing was undone.

    block_size: numbers that share a scale; None for a row
    """
    factors = torch.ones(()) if smoothing.factors is None else torch.from_numpy(smoothing.factors)
    rows = hidden / factors
    rows = _rotated(rows) if smoothing.is_rotated else rows
    blocks = rows.unflatten(-1, (-1, block_size or rows.shape[-1]))
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=torch.finfo(hidden.dtype).tiny)
    rounded = ((blocks / scales).round() * scales).flatten(-2)
    return (_rotated(rounded) if smoothing.is_rotated else rounded) * factors
