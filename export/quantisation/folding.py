"""Smoothing that becomes part of a model's weights, so that a pass does nothing for it.

Inputs of some products are outputs of others: those of a down projection are multiplied by an activation in
between, and those of attention's last projection are weighted sums of the values. So the weights before can
divide the inputs by their factors (SmoothQuant: Xiao et al., arXiv 2211.10438, section 4). Weighted sums can
also be rotated there (QuaRot: Ashkboos et al., arXiv 2404.00456, section 4).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.quantisation.smoothing import ROTATED, Smoothing, rotate


@dataclass(frozen=True)
class PreviousLayer:
    """A linear layer whose outputs become the inputs of a product.

    head_dim: neighbours of the outputs that stay together
    num_groups: how often such neighbours follow each other in the inputs: the query heads of a value head
    passes_rotations: whether inputs are rotated if the outputs are
    """

    module: nn.Linear
    head_dim: int
    num_groups: int = 1
    passes_rotations: bool = False

    def shared(self, rms: NDArray[np.float32]) -> NDArray[np.float32]:
        """Root mean squares [K] of inputs, or of weights, over all that come from one output."""
        squares = np.square(rms).reshape(-1, self.num_groups, self.head_dim).mean(1, keepdims=True)
        return np.sqrt(squares.repeat(self.num_groups, 1)).reshape(rms.shape)

    @torch.no_grad()
    def absorb(self, product: nn.Linear, smoothing: Smoothing) -> Smoothing:
        """Change the weights of both layers; returns what is left for a pass to do.

        smoothing: of the product, with factors as ``shared`` makes them
        """
        factors = smoothing.factors
        if factors is not None:
            own = torch.from_numpy(factors.reshape(-1, self.num_groups, self.head_dim)[:, 0].reshape(-1))
            _set_weight(product, product.weight * torch.from_numpy(factors))
            _change_outputs(self.module, lambda outputs: outputs / own)
        if not (smoothing.is_rotated and self.passes_rotations):
            return replace(smoothing, factors=None)
        _set_weight(product, _rotated(product.weight))
        _change_outputs(self.module, _rotated)
        return replace(smoothing, factors=None, is_rotated=False)


def previous_layers(model: Any) -> dict[nn.Linear, PreviousLayer]:
    """Those of a model, by the products that read their outputs."""
    found = {}
    for module in model.modules():
        value, output = (_linear(module, name) for name in ("v_proj", "o_proj"))
        if value and output:
            head_dim = int(module.head_dim)
            groups = output.in_features // value.out_features
            found[output] = PreviousLayer(value, head_dim, groups, passes_rotations=head_dim % ROTATED == 0)
        gate, up, down = (_linear(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
        if gate and up and down:
            found[down] = PreviousLayer(up, up.out_features)
    return found


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    child = getattr(module, name, None)
    return child if isinstance(child, nn.Linear) else None


def _rotated(rows: Tensor) -> Tensor:
    return torch.from_numpy(rotate(np.ascontiguousarray(rows.numpy())))


def _change_outputs(module: nn.Linear, change: Callable[[Tensor], Tensor]) -> None:
    """Let a layer give changed outputs [..., N]; ``change`` is linear."""
    _set_weight(module, change(module.weight.T).T.contiguous())
    if module.bias is not None:
        module.bias = nn.Parameter(change(module.bias), requires_grad=False)


def _set_weight(module: nn.Linear, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)
