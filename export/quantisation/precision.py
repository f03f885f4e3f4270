"""Precisions: the type of activations, and how weights are stored."""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from runtime.core.bundle import GraphSpec, TensorSpec

# Weight-only quantisation: activations stay in a floating-point type.
QUANTIZED = ("int8", "int4", "fp8")
ACTIVATIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
PRECISIONS = (*ACTIVATIONS, *QUANTIZED)
# Parts of the names of outputs that the host computes with, which sampling and tree search need exactly.
FLOAT32_OUTPUTS = ("logits", "logprobs", "transition")


@dataclass(frozen=True)
class WeightForm:
    """How a matrix [K, N] of a product is quantised: symmetrically, with one scale for each block of rows.

    dtype: int8, int4 or fp8 (e4m3)
    block_size: rows of a column that share a scale; None for the whole column
    scale_values: the type whose values the scales have; None for the type of the activations
    """

    dtype: str
    block_size: int | None
    scale_values: str | None = None

    def fitted(self, rows: int) -> "WeightForm | None":
        """The form for a matrix of so many rows: with smaller blocks if these are whole; None without any."""
        sizes = (self.block_size, *(size for size in BLOCK_SIZES if size < (self.block_size or 0)))
        return next((replace(self, block_size=size) for size in sizes if rows % (size or 1) == 0), None)


@dataclass(frozen=True)
class Precision:
    """The types of a graph.

    activations: float32, float16 or bfloat16; matrices that are not quantised have this type too. int8
        stands for float32 that products round to int8
    weights: the form of quantised matrices, None if they are not quantised
    integer_products: whether the graph gets a second form that rounds the activations of a row to int8
    is_smoothed: whether weights and activations are smoothed before they are rounded
        (``export.quantisation.smoothing``)
    """

    activations: str
    weights: WeightForm | None = None
    integer_products: bool = False
    is_smoothed: bool = False


# The type whose values scales of blocks have. Graphs hold them in float32, and operators that are compiled
# where they run (``runtime.engines.operators``) in half precision. In float32 they would be a fifth of int4
# weights in blocks of 32.
HALF_SCALES = "float16"
# Rows of a block, from the largest on: a form whose blocks a matrix cannot have takes the next smaller ones.
BLOCK_SIZES = (128, 64, 32)
# ONNX Runtime computes products with weights in blocks of 32 faster than with one scale for a column: a
# product of 768 x 2048 with int8 weights takes 0.030 ms against 0.088 ms for one row, on 2 cores.
ONNXRUNTIME_PRECISIONS = {
    "fp32": Precision("float32"),
    "int8": Precision("float32", WeightForm("int8", 32, HALF_SCALES)),
    "int4": Precision("float32", WeightForm("int4", 32, HALF_SCALES)),
}
# PyTorch's kernel for GPUs multiplies int4 weights by scales in bfloat16. Such scales are values of float32
# too, and within its range of float16.
BFLOAT16_SCALES = WeightForm("int4", 32, "bfloat16")
# Products of whole numbers have one scale for a column, and their time grows less with the rows: a pass of
# nine takes 1.9 times as long as one of one, with int4 weights in blocks 2.8 times (docs/performance.md).
INTEGER_PRODUCTS = Precision("float32", WeightForm("int8", None), integer_products=True, is_smoothed=True)
# Some processors compute a row alone faster with blocks; further rows take more.
INT8_BLOCKS = Precision("float32", WeightForm("int8", 64, HALF_SCALES))
# By which the differences of a graph's second form are judged.
INT8_ACTIVATIONS = Precision("int8")
# The same where the reference in PyTorch rounds no activations.
INT8_ALONE = Precision("int8 alone")


def tensors_in(contract: GraphSpec, activations: str, *, features: str, capacity: int | None) -> GraphSpec:
    """The contract of a float32 graph, as it is in another precision.

    activations: the type of caches and states; log-probabilities and logits stay float32
    features: the type of tensors whose names end in ``features``: the target model's hidden states, or the
        states that a head hands from one pass to the next
    capacity: positions of the cache if the graph fixes them
    """

    def tensor(given: TensorSpec, is_output: bool) -> TensorSpec:
        shape = tuple(capacity if capacity and axis == "S" else axis for axis in given.shape)
        exact = is_output and any(part in given.name for part in FLOAT32_OUTPUTS)
        if given.dtype != "float32" or exact:
            return TensorSpec(given.name, shape, given.dtype)
        return TensorSpec(given.name, shape, features if given.name.endswith("features") else activations)

    return GraphSpec(
        tuple(tensor(each, False) for each in contract.inputs),
        tuple(tensor(each, True) for each in contract.outputs),
    )
