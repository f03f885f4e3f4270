"""Smoothing of activations and weights before they are rounded.

Engines round the activations of a row to int8, with one scale or one for each block, and weights to int8 or
int4. A few large numbers make a scale large, and all others lose bits. Smoothing makes the numbers of a row
more alike and changes no product:

factors    A few channels of activations are much larger than the others in every row. They are divided by a
           factor, and their weights are multiplied by it (SmoothQuant: Xiao et al., arXiv 2211.10438,
           equation 3).
rotations  A number may be large in one row alone. A Hadamard matrix spreads it over 64 neighbours, and the
           weights are multiplied by the same matrix (QuaRot: Ashkboos et al., arXiv 2404.00456).

``export.quantisation.choose_smoothing`` chooses both, and ``export.quantisation.folding`` lets the weights of
other layers do what they can of it.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
    producer = rows.producer()
    weight = producer.inputs[1] if producer and producer.op_type == "RMSNormalization" else None
    if producer is not None and weight is not None and weight.const_value is not None:
        constant, near = weight.const_value.numpy() / factors, producer
        inputs, attributes = [producer.inputs[0]], dict(producer.attributes)
        operator, insert = "RMSNormalization", graph.insert_after
    else:
        constant, near = 1 / factors, node
        inputs, attributes = [rows], {}
        operator, insert = "Mul", graph.insert_before
    # Products that read the same rows may have other factors.
    name = f"{rows.name}_divided_for_{node.outputs[0].name}"
    value = ir.val(f"{name}_weights", const_value=ir.tensor(constant.astype(np.float32)))
    graph.register_initializer(value)
    division = ir.node(operator, [*inputs, value], attributes)
    result = division.outputs[0]
    result.name, result.type, result.shape = name, rows.type, rows.shape
    insert(near, division)
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
            graph.register_initializer(ir.val(name, const_value=ir.tensor(array)))
        rotation = ir.node(operator, [rows, graph.initializers[name]])
        graph.insert_before(node, rotation)
        result = rotation.outputs[0]
        result.name, result.type, result.shape = f"{rows.name}_{name}", rows.type, shape
        rows = result
    return rows
