"""Smoothing of activations and weights before they are rounded.

Engines round the activations of a row to int8, with one scale or one for each block, and weights to int8 or
int4. A few large numbers make a scale large, and all others lose bits. Smoothing makes the numbers of a row
more alike and changes no product:

factors    A few channels of activations are much larger than the others in every row. They are divided by a
           factor, and their weights are multiplied by it (SmoothQuant: Xiao et al., arXiv 2211.10438,
           equation 3).
rotations  A number may be large in one row alone. A Hadamard matrix spreads it over 64 neighbours, and the
           weights are multiplied by the same matrix (QuaRot: Ashkboos et al., arXiv 2404.00456).

``export.quantisation.choose_smoothing`` chooses both.

A ``Smoothing`` changes a pass. A ``PreviousLayer`` lets the model's weights do what they can of it, because
inputs of some products are outputs of others. Those of a down projection are multiplied by an activation in
between, and those of attention's last projection are weighted sums of the values. So the weights before can
divide the inputs by their factors (SmoothQuant, section 4). Weighted sums can also be rotated there (QuaRot,
section 4).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.nodes import constant, input_of, producer

# Neighbours that are rotated together: a divisor of most widths.
ROTATED = 64


@cache
def hadamard() -> NDArray[np.float32]:
    """The orthonormal Hadamard matrix [64, 64] (Sylvester), which is symmetric and so its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < ROTATED:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(ROTATED))


def rotate(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows [..., K], every 64 neighbours of which are multiplied by the Hadamard matrix."""
    return (rows.reshape(-1, ROTATED) @ hadamard()).reshape(rows.shape)


@dataclass(frozen=True, eq=False)
class Smoothing:
    """How the inputs [..., K] of a product and its weights [K, N] change before they are rounded.

    factors: [K] float32 or None; inputs are divided by them, and rows of weights multiplied
    is_rotated: whether both are rotated then; K is a multiple of 64
    powers: [K] float32, the mean squares of the inputs after that; None if they were not measured
    """

    factors: NDArray[np.float32] | None = None
    is_rotated: bool = False
    powers: NDArray[np.float32] | None = None

    def of_weights(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """Weights [K, N] float32 as they are rounded."""
        matrix = matrix if self.factors is None else matrix * self.factors[:, None]
        return rotate(matrix.T).T if self.is_rotated else matrix

    def original_weights(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """The inverse of ``of_weights``."""
        matrix = rotate(matrix.T).T if self.is_rotated else matrix
        return matrix if self.factors is None else matrix / self.factors[:, None]

    def of_inputs(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Inputs [..., K] float32 as they are rounded."""
        rows = rows if self.factors is None else rows / self.factors
        return rotate(rows) if self.is_rotated else rows

    def original_inputs(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """The inverse of ``of_inputs``."""
        rows = rotate(rows) if self.is_rotated else rows
        return rows if self.factors is None else rows * self.factors

    def in_graph(self, graph: ir.Graph, node: ir.Node, rows: ir.Value, width: int) -> ir.Value:
        """Add ``of_inputs`` to a graph.

        node: the product that reads the rows
        rows: [..., width] float32, its inputs
        """
        if self.factors is not None:
            rows = _divide(graph, node, rows, self.factors)
        return _rotate(graph, node, rows, width) if self.is_rotated else rows


UNSMOOTHED = Smoothing()


def _divide(graph: ir.Graph, node: ir.Node, rows: ir.Value, factors: NDArray[np.float32]) -> ir.Value:
    """The rows [..., K] divided by the factors [K]; a norm that gives the rows has other weights for that."""
    # Products that read the same rows may have other factors.
    name = f"{rows.name}_divided_for_{node.outputs[0].name}"
    result = ir.val(name, shape=rows.shape, type=rows.type)
    norm = producer(rows, "RMSNormalization")
    weight = input_of(norm, 1)
    if norm is not None and weight is not None and weight.const_value is not None:
        weights = (weight.const_value.numpy() / factors).astype(np.float32)
        inputs = [norm.inputs[0], constant(graph, f"{name}_weights", weights)]
        graph.insert_after(norm, ir.node(norm.op_type, inputs, dict(norm.attributes), outputs=[result]))
    else:
        weights = (1 / factors).astype(np.float32)
        inputs = [rows, constant(graph, f"{name}_weights", weights)]
        graph.insert_before(node, ir.node("Mul", inputs, outputs=[result]))
    return result


def _rotate(graph: ir.Graph, node: ir.Node, rows: ir.Value, width: int) -> ir.Value:
    """The rows [..., width], rotated by a Reshape, a MatMul and a Reshape."""
    assert rows.shape is not None
    axes = rows.shape[:-1]
    kept = [0] * len(axes)  # 0 keeps an axis as it is.
    in_parts = ir.Shape([*axes, width // ROTATED, ROTATED])
    for operator, name, array, shape in (
        ("Reshape", f"parts_{len(axes)}", np.array([*kept, -1, ROTATED], np.int64), in_parts),
        ("MatMul", "hadamard", hadamard(), in_parts),
        ("Reshape", f"whole_{len(axes)}_{width}", np.array([*kept, width], np.int64), rows.shape),
    ):
        if name not in graph.initializers:
            constant(graph, name, array)
        result = ir.val(f"{rows.name}_{name}", shape=shape, type=rows.type)
        graph.insert_before(node, ir.node(operator, [rows, graph.initializers[name]], outputs=[result]))
        rows = result
    return rows


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
