"""Quantise the weights of products: from MatMul to DequantizeLinear and MatMul.

Both are standard operators, which ONNX Runtime and TensorRT fuse into one kernel. Activations keep their
type. Rounding is symmetric: a scale is the largest magnitude of its block over the largest code.
"""

import hashlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from export.precision import NUMPY_TYPES, WeightForm

Array = NDArray[np.generic]

CODES: dict[str, np.dtype[np.generic]] = {
    "int4": np.dtype(ml_dtypes.int4),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
LARGEST_CODE = {"int4": 7, "int8": 127, "fp8": 448}
SCALES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [K, N] as codes [K, N] and scales [K / block, N], or [N] for whole columns."""

    codes: Array
    scales: Array

    def dequantized(self) -> NDArray[np.float32]:
        """[K, N], as an engine computes it."""
        codes, scales = self.codes.astype(np.float32), self.scales.astype(np.float32)
        blocks = codes.reshape(scales.shape[0] if scales.ndim > 1 else 1, -1, codes.shape[-1])
        return (blocks * scales.reshape(blocks.shape[0], 1, -1)).reshape(codes.shape)


def quantize(weights: NDArray[np.float32], form: WeightForm, scale_dtype: str) -> QuantizedMatrix:
    """weights [K, N], K a multiple of the form's block."""
    rows, columns = weights.shape
    blocks = weights.reshape(-1, form.block_size or rows, columns)
    largest = LARGEST_CODE[form.dtype]
    dtype = NUMPY_TYPES[scale_dtype]
    # A column of zeros needs a scale too.
    smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
    scales = np.maximum(np.abs(blocks).max(axis=1) / largest, smallest).astype(dtype)
    codes = blocks / scales.astype(np.float32)[:, None]
    if form.dtype != "fp8":
        codes = np.rint(codes)
    codes = np.clip(codes, -largest, largest).astype(CODES[form.dtype]).reshape(rows, columns)
    return QuantizedMatrix(codes, scales if form.block_size else scales[0])


def digest(matrix: NDArray[np.float32]) -> str:
    """Names a matrix by its content."""
    return hashlib.sha256(np.ascontiguousarray(matrix).data).hexdigest()


@dataclass(frozen=True)
class QuantizedProducts:
    """What ``quantize_products`` did.

    matrices: the quantised ones, by the digest of what they were
    num_partial: weights that stay as they are because their rows are no multiple of the block
    """

    matrices: dict[str, QuantizedMatrix]
    num_partial: int


def quantize_products(
    model: ir.Model, form: WeightForm, scale_dtype: str, *, skip_columns: int | None = None
) -> QuantizedProducts:
    """Quantise every weight [K, N] that a MatMul reads, in place.

    scale_dtype: the type of the activations
    skip_columns: leave matrices of so many columns as they are, such as the LM head
    Matrices of one column (the blank's logit) stay too: they save nothing and cost the most accuracy. So do
    those whose rows are no multiple of the block.
    """
    found: dict[str, QuantizedMatrix] = {}
    partial: set[ir.Value] = set()
    weights: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        value = node.inputs[1] if node.op_type == "MatMul" else None
        if value is None or value.const_value is None or not _may_quantize(value, skip_columns):
            continue
        matrix = value.const_value.numpy()
        if matrix.shape[0] % (form.block_size or 1):
            partial.add(value)
            continue
        if value not in weights:
            quantized = quantize(matrix, form, scale_dtype)
            found[digest(matrix)] = quantized
            weights[value] = _dequantize(model.graph, node, value, quantized, form)
        node.replace_input_with(1, weights[value])
    RemoveUnusedNodesPass()(model)
    return QuantizedProducts(found, len(partial))


def _may_quantize(value: ir.Value, skip_columns: int | None) -> bool:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype != ir.DataType.FLOAT:
        return False
    return tensor.shape.numpy()[1] not in (1, skip_columns)


def _dequantize(
    graph: ir.Graph, before: ir.Node, value: ir.Value, quantized: QuantizedMatrix, form: WeightForm
) -> ir.Value:
    """A DequantizeLinear that gives the matrix in place of ``value``."""
    inputs = [
        ir.val(f"{value.name}_{name}", const_value=ir.tensor(np.ascontiguousarray(array)))
        for name, array in (("codes", quantized.codes), ("scales", quantized.scales))
    ]
    for constant in inputs:
        graph.register_initializer(constant)
    attributes = {"axis": 0, "block_size": form.block_size} if form.block_size else {"axis": 1}
    node = ir.node("DequantizeLinear", inputs, attributes)
    result = node.outputs[0]
    result.name, result.shape = f"{value.name}_dequantized", value.shape
    # The graph is still in float32; a pass to half precision casts the scales, which fit exactly.
    result.dtype = ir.DataType.FLOAT
    graph.insert_before(before, node)
    return result
