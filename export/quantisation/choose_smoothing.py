"""Chooses how the products of a model are smoothed, by the noise that rounding adds to them on a text.

The factors of a product are s = x^alpha / w^(1 - alpha), where x [K] and w [K] are the root mean squares of
its inputs' channels and of its weights' rows. SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4) takes
their largest magnitudes, and AWQ (Lin et al., arXiv 2306.00978, equation 5) the inputs' means alone; after
both rounding added more noise to SmolLM2-135M-Instruct, in int8 and in int4. The exponent alpha is chosen for
each input of products.

Noise of one layer adds to that of the next. So where the products of a model have much of it together, the
inputs that gain most are rotated, until it is little.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.quantisation.precision import WeightForm
from export.quantisation.quality import CALIBRATION, CALIBRATION_TOKENS, token_ids
from export.quantisation.smoothing import ROTATED, PreviousLayer, Smoothing, previous_layers
from export.quantisation.weights import digest, quantize
from export.source import Source

# By so many of them, and so many columns of the weights, noise is measured.
SAMPLED_ROWS, SAMPLED_COLUMNS = 256, 256
# A channel that the text never uses, or that no weight reads, has a factor nevertheless.
SMALLEST = 1e-5
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# By the type of the weights: the noise of a model's products, each as a share of its power, summed. Inputs
# are rotated until there is no more. SmolLM2-135M-Instruct has 0.030 in int8 and 0.59 in int4, and rotations
# of all its inputs leave 0.011 and 0.54. The demo's model has 0.005 and 0.15: it gains nothing by rotations.
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
            def rounded(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                rows = smoothing.of_inputs(inputs[0].numpy())
                return torch.from_numpy(smoothing.original_inputs(_rounded(rows, None))), *inputs[1:]

            return rounded

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

    Weights take what they can of it in place (``PreviousLayer``). The logits stay the same.

    text: a UTF-8 file; None takes the text that comes with the package
    form: of the weights
    Matrices that no ``nn.Linear`` holds, such as experts side by side, are not smoothed. Neither are those
    whose rows are no multiple of a block, because they are not quantised. Raises ExportError.
    """
    ids = token_ids(source, CALIBRATION, text, CALIBRATION_TOKENS)
    groups = [inputs for inputs in inputs_of_products(source.model, ids) if form.fitted(len(inputs.rms))]
    # Streams run through layers of the target model that are not to change under them.
    has_streams = source.drafter is not None and source.drafter.config.trunk_type.borrows_layers
    known = {} if has_streams else previous_layers(source.model)
    of_groups = [known.get(inputs.members[0]) for inputs in groups]
    tried = [candidates(inputs, form, previous) for inputs, previous in zip(groups, of_groups, strict=True)]
    chosen = [min(_without_work(found, previous)) for found, previous in zip(tried, of_groups, strict=True)]
    gains = [free.noise - min(found).noise for free, found in zip(chosen, tried, strict=True)]
    total = sum(each.noise for each in chosen)
    for index in sorted(range(len(groups)), key=lambda index: -gains[index]):
        if total <= MOST_NOISE[form.dtype]:
            break
        chosen[index] = min(tried[index])
        total -= gains[index]
    # The weights of the previous layers change too, so digests are taken when all have changed.
    left = [
        previous.absorb(inputs.members[0], candidate.smoothing) if previous else candidate.smoothing
        for inputs, candidate, previous in zip(groups, chosen, of_groups, strict=True)
    ]
    smoothings: dict[str, Smoothing] = {}
    modules: list[tuple[nn.Linear, str]] = []
    for inputs, smoothing in zip(groups, left, strict=True):
        keys = [digest(member.weight.numpy().T) for member in inputs.members]
        smoothings.update(dict.fromkeys(keys, smoothing))
        modules += zip(inputs.members, keys, strict=True)
    return SmoothedProducts(smoothings, tuple(modules))


@dataclass
class Inputs:
    """The activations that some linear layers read, such as those of Q, K and V.

    rms: float32 [K], the root mean square of every channel
    rows: float32 [T, K], a sample of the activations
    """

    rms: NDArray[np.float32]
    rows: NDArray[np.float32]
    members: list[nn.Linear]


def inputs_of_products(model: Any, ids: Tensor) -> list[Inputs]:
    """Those of every linear layer, on a text of token ids int64 [1, L]."""
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
            rows = hidden.flatten(0, -2).numpy()
            groups.append(Inputs(_rms(rows), _sample(rows, SAMPLED_ROWS).copy(), []))
        groups[-1].members.append(module)

    handles = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return groups


def _rms(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.sqrt(np.square(rows).mean(0)).clip(min=SMALLEST)


def _sample(rows: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """At most so many rows, evenly spread."""
    return rows[:: max(1, len(rows) // count)][:count]


@dataclass(frozen=True, order=True)
class Candidate:
    """A smoothing, and the noise that rounding adds to products after it, as a share of their power."""

    noise: float
    smoothing: Smoothing = field(compare=False)


def _without_work(found: list[Candidate], previous: PreviousLayer | None) -> list[Candidate]:
    """The candidates that rotate nothing in a pass."""
    return [c for c in found if not c.smoothing.is_rotated or (previous and previous.passes_rotations)]


def candidates(inputs: Inputs, form: WeightForm, previous: PreviousLayer | None = None) -> list[Candidate]:
    """Every smoothing that is tried for some products, by the noise of a sample.

    form: of the weights; activations have scales for blocks of the same size
    previous: the layer before, whose weights are to absorb the factors
    """
    form = form.fitted(len(inputs.rms)) or form
    weights = np.concatenate([member.weight.numpy() for member in inputs.members])
    rms, rms_of_weights = inputs.rms, _rms(weights)
    if previous:
        rms, rms_of_weights = previous.shared(rms), previous.shared(rms_of_weights)
    sample = _sample(weights, SAMPLED_COLUMNS).T
    exact = inputs.rows @ sample
    power = np.square(exact).sum(-1).clip(min=np.finfo(np.float32).tiny)
    found = []
    for alpha, is_rotated in product((None, *ALPHAS), (False, True)):
        if is_rotated and len(sample) % ROTATED:
            continue
        factors = None if alpha is None else rms**alpha / rms_of_weights ** (1 - alpha)
        smoothing = Smoothing(factors, is_rotated)
        rows = smoothing.of_inputs(inputs.rows)
        smoothing = replace(smoothing, powers=np.square(rows).mean(0))
        rounded = quantize(smoothing.of_weights(sample), form, "float32", smoothing.powers)
        errors = _rounded(rows, form.block_size) @ rounded.dequantized() - exact
        found.append(Candidate(float((np.square(errors).sum(-1) / power).mean()), smoothing))
    return found


def _rounded(rows: NDArray[np.float32], block_size: int | None) -> NDArray[np.float32]:
    """Activations [..., K] rounded to int8, with a scale for so many neighbours, or for a row."""
    columns = rows.reshape(-1, rows.shape[-1]).T
    return quantize(columns, WeightForm("int8", block_size), "float32").dequantized().T.reshape(rows.shape)
