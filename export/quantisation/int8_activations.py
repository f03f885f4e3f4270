"""Products of int8 activations with int8 weights: the factors that prepare both, and PyTorch's reference.

An engine rounds the activations of a row with one scale, and the weights of a column with one scale; so their
sums are whole numbers, the same in any order and beside any other row. A few channels of activations are much
larger than the others, and would take most of the 8 bits for themselves. They are divided by a factor, and
their weights multiplied by it, which changes no sum (SmoothQuant: Xiao et al., arXiv 2211.10438, equation 4,
with alpha 0.5).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.quantisation.texts import CALIBRATION, token_ids
from export.quantisation.weights import digest
from export.source import Source

# As many tokens as the text of the package has with a small vocabulary.
MAX_TOKENS = 2048
LARGEST_CODE = 127
# A channel that the text never uses, or that no weight reads, has a factor nevertheless.
SMALLEST = 1e-5


@dataclass(frozen=True)
class SmoothedProducts:
    """The products of a model that an engine can compute with activations in int8.

    factors: by the digest of a weight [K, N]: the factors [K], float32, by which its rows are multiplied and
        its activations divided
    modules: the module of every product, with the digest of its weight
    """

    factors: Mapping[str, NDArray[np.float32]]
    modules: tuple[tuple[nn.Linear, str], ...]

    @contextmanager
    def rounding_activations(self, quantized: Collection[str]) -> Iterator[None]:
        """Let modules round their activations as an engine does: the codes of a row share a scale.

        quantized: the digests of the weights that were quantised
        """

        def hook(factors: Tensor) -> Callable[..., tuple[Any, ...]]:
            return lambda _, inputs: (_rounded(inputs[0], factors), *inputs[1:])

        handles = [
            module.register_forward_pre_hook(hook(torch.from_numpy(self.factors[key])))
            for module, key in self.modules
            if key in quantized
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def smooth_products(source: Source, text: Path | None) -> SmoothedProducts:
    """The factors of all linear layers of the target model, by its activations on a text.

    text: a UTF-8 file; None takes the text that comes with the package
    Matrices that no ``nn.Linear`` holds, such as experts side by side, have no factors. Raises ExportError.
    """
    ids = token_ids(source, CALIBRATION, text, MAX_TOKENS)
    groups = _largest_activations(source.model, ids)
    factors: dict[str, NDArray[np.float32]] = {}
    modules = []
    for activations, members in groups:
        weights = torch.stack([member.weight.abs().amax(0) for member in members]).amax(0)
        shared = (activations.clamp(min=SMALLEST) / weights.clamp(min=SMALLEST)).sqrt().float()
        for member in members:
            key = digest(member.weight.numpy().T)
            factors[key] = shared.numpy()
            modules.append((member, key))
    return SmoothedProducts(factors, tuple(modules))


def _largest_activations(model: Any, ids: Tensor) -> list[tuple[Tensor, list[nn.Linear]]]:
    """The largest magnitude [K] of every channel that linear layers read, with the layers that share it."""
    groups: list[tuple[Tensor, list[nn.Linear]]] = []
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
            groups.append((hidden.detach().abs().flatten(0, -2).amax(0), []))
        groups[-1][1].append(module)

    handles = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return groups


def _rounded(hidden: Tensor, factors: Tensor) -> Tensor:
    """Activations [..., K], each row rounded to int8 after the division by the factors."""
    divided = hidden / factors
    scales = (divided.abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=torch.finfo(hidden.dtype).tiny)
    return (divided / scales).round() * scales * factors
