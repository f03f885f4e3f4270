"""Quantise the weights of a graph, and give the torch modules the same rounded weights.

Products: MatMul becomes DequantizeLinear and MatMul. Both are standard operators, which ONNX Runtime and
TensorRT fuse into one kernel. The token embedding: int8 codes with one scale for each token. A pass looks up
the codes and the scales of its tokens and multiplies them; the table is never dequantised.

Activations keep their type. Rounding is symmetric: a scale is the largest magnitude of its block over the
largest code, or less for int4, whose few codes then lie closer together. A matrix may have been rounded
before, together with its inputs (``export.quantisation.gptq``), and what a quantised checkpoint has in the
same form is not rounded again (``export.quantisation.stored``). The torch modules get the rounded
weights, so that PyTorch is a reference for the graph.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from export.errors import ExportError
from export.nodes import constant
from export.quantisation.precision import NUMPY_TYPES, WeightForm
from export.quantisation.smoothing import UNSMOOTHED, Smoothing

Array = NDArray[np.generic]

CODES: dict[str, np.dtype[np.generic]] = {
    "int4": np.dtype(ml_dtypes.int4),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}
SMALLEST_CODE = {"int4": -8, "int8": -127, "fp8": -448}
LARGEST_CODE = {"int4": 7, "int8": 127, "fp8": 448}
# Scales of int4 that are tried, as shares of the least one at which no number of a block is cut off. Of equal
# ones the first is taken.
INT4_SCALES = np.linspace(1.0, 0.7, 12, dtype=np.float32)
# Numbers that are tried at a time, to stay in a processor's cache.
TRIED_AT_A_TIME = 1 << 18
# Of a block of zeros, for which any scale would do. With the smallest one, products with activations would be
# subnormal numbers, which some processors multiply a hundred times slower.
SCALE_OF_ZEROS = 1.0
# The form of a transposed token embedding [H, V]: a scale for each column, which is a token.
EMBEDDING_FORM = WeightForm("int8", None)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [K, N] as codes [K, N] and scales [K / block, N], or [N] for whole columns.

    smoothing: the codes are of the matrix after this was applied
    """

    codes: Array
    scales: Array
    smoothing: Smoothing = UNSMOOTHED

    def dequantized(self) -> NDArray[np.float32]:
        """[K, N], as an engine computes it."""
        codes, scales = self.codes.astype(np.float32), self.scales.astype(np.float32)
        blocks = codes.reshape(scales.shape[0] if scales.ndim > 1 else 1, -1, codes.shape[-1])
        matrix = (blocks * scales.reshape(blocks.shape[0], 1, -1)).reshape(codes.shape)
        return self.smoothing.original_weights(matrix)


def quantize(
    weights: NDArray[np.float32],
    form: WeightForm,
    scale_dtype: str,
    powers: NDArray[np.float32] | None = None,
) -> QuantizedMatrix:
    """Weights [K, N], K a multiple of the form's block, rounded to codes.

    powers: float32 [K], the mean squares of what is multiplied with the rows of the weights. By them the
        scales of int4 are chosen, for which the product has the least error if these are independent; None
        counts all rows alike
    """
    rows, columns = weights.shape
    blocks = weights.reshape(-1, form.block_size or rows, columns)
    scales = choose_scales(blocks, form, scale_dtype, powers)
    codes = blocks / scales.astype(np.float32)[:, None]
    if form.dtype != "fp8":
        codes = np.rint(codes)
    codes = np.clip(codes, SMALLEST_CODE[form.dtype], LARGEST_CODE[form.dtype])
    codes = codes.astype(CODES[form.dtype]).reshape(rows, columns)
    return QuantizedMatrix(codes, scales if form.block_size else scales[0])


def choose_scales(
    blocks: NDArray[np.float32],
    form: WeightForm,
    scale_dtype: str,
    powers: NDArray[np.float32] | None = None,
) -> Array:
    """The scales [B, N] of blocks [B, R, N] of weights.

    powers: as of ``quantize``, [B * R]
    """
    lowest, highest = SMALLEST_CODE[form.dtype], LARGEST_CODE[form.dtype]
    dtype, values = NUMPY_TYPES[scale_dtype], NUMPY_TYPES[form.scale_values or scale_dtype]
    range_of_values = ml_dtypes.finfo(values)
    smallest = max(ml_dtypes.finfo(dtype).smallest_normal, range_of_values.smallest_subnormal)

    def as_stored(scales: NDArray[np.float32]) -> Array:
        return np.clip(scales, float(smallest), float(range_of_values.max)).astype(values).astype(dtype)

    # The least scales at which no number is cut off.
    reach = np.maximum(blocks.max(axis=1) / highest, blocks.min(axis=1) / lowest)
    if form.dtype == "int4":
        reach = reach * _best_shares(blocks, reach, as_stored, powers)
    return np.where(reach > 0, as_stored(reach), np.array(SCALE_OF_ZEROS, dtype))


def _best_shares(
    blocks: NDArray[np.float32],
    reach: NDArray[np.float32],
    as_stored: Callable[[NDArray[np.float32]], Array],
    powers: NDArray[np.float32] | None,
) -> NDArray[np.float32]:
    """Of ``INT4_SCALES`` those [B, N] with which blocks [B, R, N] have the least error.

    as_stored: rounds scales as they will be
    powers: as of ``quantize``
    """
    lowest, highest = SMALLEST_CODE["int4"], LARGEST_CODE["int4"]
    count, size, columns = blocks.shape
    weights = torch.ones(count * size) if powers is None else torch.from_numpy(powers)
    weights = weights.reshape(count, size, 1)
    at_a_time = max(1, TRIED_AT_A_TIME // (size * columns))
    best = np.empty((count, columns), np.float32)
    for start in range(0, count, at_a_time):
        part = slice(start, start + at_a_time)
        block = torch.from_numpy(blocks[part].copy())
        least = torch.full((len(block), columns), torch.inf)
        chosen = torch.empty_like(least)
        for share in INT4_SCALES:
            scale = torch.from_numpy(as_stored(reach[part] * share).astype(np.float32)).unsqueeze(1)
            error = (block / scale).round_().clamp_(lowest, highest).mul_(scale).sub_(block).square_()
            error = error.mul_(weights[part]).sum(1)
            chosen = torch.where(error < least, float(share), chosen)
            least = torch.minimum(error, least)
        best[part] = chosen.numpy()
    return best


def digest(matrix: NDArray[np.float32]) -> str:
    """The SHA-256 of a matrix's content, by which quantised matrices are found again."""
    return hashlib.sha256(np.ascontiguousarray(matrix).data).hexdigest()


@dataclass(frozen=True)
class QuantizedProducts:
    """The result of ``quantize_products``.

    matrices: the quantised matrices, by the digest of the original
    num_partial: weights that stay as they are because their rows are no multiple of any block
    num_kept: quantised matrices that a checkpoint had in this form already
    """

    matrices: dict[str, QuantizedMatrix]
    num_partial: int
    num_kept: int = 0


# Finds a matrix [K, N] of float32 among those of a checkpoint, in a form and with scales of a type.
Finder = Callable[[NDArray[np.float32], WeightForm, str], QuantizedMatrix | None]


def quantize_products(
    model: ir.Model,
    form: WeightForm,
    scale_dtype: str,
    *,
    other_forms: Mapping[int, WeightForm | None] | None = None,
    find: Finder | None = None,
    smoothings: Mapping[str, Smoothing] | None = None,
    rounded: Mapping[str, QuantizedMatrix] | None = None,
) -> QuantizedProducts:
    """Quantise every weight [K, N] that a MatMul reads, in place.

    scale_dtype: the type of the activations
    other_forms: of matrices of so many columns, such as the LM head; None leaves them as they are
    find: gives the matrices that are not rounded because a checkpoint has them in this form
    smoothings: of activations and weights, by the digests of matrices
    rounded: matrices that have been rounded to this form before, by their digests
    Matrices of one column (the blank's logit) stay too: they save nothing and cost the most accuracy. So do
    those whose rows are no multiple of any block.
    """
    found: dict[str, QuantizedMatrix] = {}
    partial: set[ir.Value] = set()
    weights: dict[ir.Value, tuple[ir.Value, QuantizedMatrix]] = {}
    smoothed: dict[tuple[ir.Value, Smoothing], ir.Value] = {}
    num_kept = 0
    for node in list(model.graph):
        rows, value = node.inputs[:2] if node.op_type == "MatMul" else (None, None)
        if rows is None or value is None or value.const_value is None:
            continue
        if not _is_matrix(value):
            continue
        if value not in weights:
            matrix = value.const_value.numpy()
            own_form = (other_forms or {}).get(matrix.shape[1], form)
            if own_form is None:
                continue
            key = digest(matrix)
            fitted = own_form.fitted(len(matrix))
            if fitted is None:
                partial.add(value)
                continue
            quantized = find(matrix, fitted, scale_dtype) if find else None
            num_kept += quantized is not None
            if quantized is None and rounded:
                quantized = rounded.get(key)
            if quantized is None:
                smoothing = (smoothings or {}).get(key, UNSMOOTHED)
                quantized = quantize(smoothing.of_weights(matrix), fitted, scale_dtype, smoothing.powers)
                quantized = replace(quantized, smoothing=smoothing)
            found[key] = quantized
            weights[value] = _dequantize(model.graph, node, value, quantized, fitted), quantized
        dequantized, quantized = weights[value]
        node.replace_input_with(1, dequantized)
        place = rows, quantized.smoothing
        if place not in smoothed:
            smoothed[place] = quantized.smoothing.in_graph(model.graph, node, rows, len(quantized.codes))
        node.replace_input_with(0, smoothed[place])
    RemoveUnusedNodesPass()(model)
    return QuantizedProducts(found, len(partial), num_kept)


def _is_matrix(value: ir.Value) -> bool:
    """Whether a value is a float32 weight of several columns."""
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype != ir.DataType.FLOAT:
        return False
    return tensor.shape.numpy()[1] != 1


def _dequantize(
    graph: ir.Graph, before: ir.Node, value: ir.Value, quantized: QuantizedMatrix, form: WeightForm
) -> ir.Value:
    """A DequantizeLinear that gives the matrix in place of ``value``."""
    inputs = [
        constant(graph, f"{value.name}_{name}", np.ascontiguousarray(array))
        for name, array in (("codes", quantized.codes), ("scales", quantized.scales))
    ]
    attributes = {"axis": 0, "block_size": form.block_size} if form.block_size else {"axis": 1}
    # The graph is still in float32; a pass to half precision casts the scales, which fit exactly.
    result = ir.val(f"{value.name}_dequantized", ir.DataType.FLOAT, value.shape)
    graph.insert_before(before, ir.node("DequantizeLinear", inputs, attributes, outputs=[result]))
    return result


def quantize_embedding(
    model: ir.Model, embedding: NDArray[np.float32], scale_dtype: str
) -> dict[str, QuantizedMatrix]:
    """Quantise the token embedding [V, H] wherever a Gather reads it, in place.

    scale_dtype: the type of the activations
    Returns the quantised transposed tables by the digest of the original, like ``quantize_products``.
    """
    found: dict[str, QuantizedMatrix] = {}
    tables: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for node in [node for node in model.graph if node.op_type == "Gather"]:
        table = node.inputs[0]
        tensor = None if table is None else table.const_value
        if table is None or tensor is None or tensor.dtype != ir.DataType.FLOAT:
            continue
        # The tables of a transition have the same shape if its size is the model's.
        if table not in tables and not np.array_equal(tensor.numpy(), embedding):
            continue
        if table not in tables:
            matrix = tensor.numpy().T
            quantized = quantize(matrix, EMBEDDING_FORM, scale_dtype)
            found[digest(matrix)] = quantized
            codes = np.ascontiguousarray(quantized.codes.T)  # [V, H], with scales [V, 1]
            tables[table] = (
                constant(model.graph, f"{table.name}_codes", codes),
                constant(model.graph, f"{table.name}_scales", quantized.scales[:, None]),
            )
        _look_up(model.graph, node, *tables[table])
    RemoveUnusedNodesPass()(model)
    return found


def _look_up(graph: ir.Graph, gather: ir.Node, codes: ir.Value, scales: ir.Value) -> None:
    """Replace a Gather of the table by the product of a Gather of codes and a Gather of scales."""
    ids, result, dtype = gather.inputs[1], gather.outputs[0], scales.dtype
    assert dtype is not None
    name, shape = result.name, result.shape
    rows = ir.val(f"{name}_of_codes_0", codes.dtype, shape)
    row_scales = ir.val(f"{name}_of_codes_1", dtype)
    cast = ir.val(f"{name}_of_codes_2", dtype, shape)
    product = ir.val(f"{name}_of_codes_3", dtype, shape)
    nodes = [
        ir.node("Gather", [codes, ids], {"axis": 0}, outputs=[rows]),
        ir.node("Gather", [scales, ids], {"axis": 0}, outputs=[row_scales]),
        ir.node("Cast", [rows], {"to": dtype}, outputs=[cast]),
        ir.node("Mul", [cast, row_scales], outputs=[product]),
    ]
    ir.convenience.replace_nodes_and_values(graph, gather, [gather], nodes, [result], [product])
    product.name = name


@dataclass(frozen=True)
class Rounded:
    """The rounded weights of a graph, by the digest of the original.

    matrices: weights [K, N] of products, as ``quantize_products`` returns them
    tables: transposed token embeddings [H, V], as ``quantize_embedding`` returns them
    """

    matrices: dict[str, QuantizedMatrix] = field(default_factory=dict)
    tables: dict[str, QuantizedMatrix] = field(default_factory=dict)


@torch.no_grad()
def round_parameters(module: nn.Module, rounded: Rounded) -> None:
    """Replace every matrix of ``module`` that its graph has quantised by the rounded matrix.

    A parameter [..., N, K] may hold several matrices. An embedding and an LM head that were one parameter are
    two afterwards. Raises ExportError if a quantised matrix is none of the module's.
    """
    missing = {*rounded.matrices, *rounded.tables}
    for owner in module.modules():
        for name, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if tensor.ndim < 2 or not tensor.is_floating_point():
                continue
            # A draft head's embedding is a buffer of this name.
            is_table = isinstance(owner, nn.Embedding) or name == "embed_tokens"
            wanted = rounded.tables if is_table else rounded.matrices
            if not wanted:
                continue
            replaced = tensor.detach().clone()
            found = [key for matrix in _matrices(replaced) if (key := _round(matrix, wanted))]
            if found:
                is_parameter = isinstance(tensor, nn.Parameter)
                value = nn.Parameter(replaced, requires_grad=False) if is_parameter else replaced
                setattr(owner, name, value)
                missing.difference_update(found)
    if missing:
        raise ExportError(f"{len(missing)} quantised matrices are no parameters of the model")


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    """The matrices [N, K] that a graph may have made of a parameter [..., N, K], as views of it."""
    if tensor.ndim == 2:
        yield tensor
        return
    stack = tensor.flatten(0, -3)
    yield from stack
    # Experts side by side: all their outputs, or all their inputs, in one product.
    yield stack.flatten(0, 1)
    yield stack.transpose(0, 1)


def _round(matrix: Tensor, rounded: dict[str, QuantizedMatrix]) -> str | None:
    """Round a matrix [N, K], or [N, E, I] with K = E I, in place if it is one of those quantised."""
    key = digest(matrix.flatten(1).numpy().T)
    if key not in rounded:
        return None
    matrix.copy_(torch.from_numpy(rounded[key].dequantized().T).reshape(matrix.shape))
    return key
