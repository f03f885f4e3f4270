"""The operators of a model's layers as functions of torch tensors: products, norms, rotation, attention.

int4 weights are multiplied by PyTorch's own kernels, which read the codes and never a dequantised matrix.
A graph has DequantizeLinear, codes [K, N] with one scale for each block of rows, and MatMul. The two become
one node ``PACKED_PRODUCT`` where a kernel takes the matrix. The kernel of GPUs multiplies bfloat16 alone:
rows of another type are rounded to it, and scales have to be values of it.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.device.pytorch.device import TorchDevice
from runtime.device.pytorch.graph import Function, Graph, Inputs, Node


def gemm(given: Inputs) -> Function:
    alpha, beta = given.get("alpha", 1.0), given.get("beta", 1.0)
    turns = [bool(given.get(name, 0)) for name in ("transA", "transB")]

    def product(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = (each.T if turned else each for each, turned in zip((a, b), turns, strict=True))
        return alpha * (a @ b) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)

    return product


def rms_normalization(given: Inputs) -> Function:
    shape, epsilon = given.shape()[given.axis(-1) :], given.get("epsilon", 1e-5)
    if math.prod(given.shape(1)) == math.prod(shape):
        # Some graphs give the scale further axes of size 1.
        return lambda tensor, scale: F.rms_norm(tensor, shape, scale.reshape(shape), epsilon)
    return lambda tensor, scale: F.rms_norm(tensor, shape, None, epsilon) * scale


def layer_normalization(given: Inputs) -> Function:
    shape, epsilon = given.shape()[given.axis(-1) :], given.get("epsilon", 1e-5)
    return lambda tensor, scale, bias=None: F.layer_norm(tensor, shape, scale, bias, epsilon)


def rotary_embedding(given: Inputs) -> Function:
    """[B, H, N, D], or [B, N, H*D] with the attribute ``num_heads``; cos and sin [B, N, R/2] or [P, R/2]."""
    shape, interleaved = given.shape(), bool(given.get("interleaved", 0))
    is_flat = len(shape) == 3
    heads = given.get("num_heads", 0)
    size = shape[2] // heads if is_flat else shape[3]
    rotated_size = given.get("rotary_embedding_dim", 0) or size

    def rotate(tensor: Tensor, cos: Tensor, sin: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            cos, sin = cos[places], sin[places]
        axis = 2 if is_flat else 1  # of the heads
        cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
        heads_apart = tensor.unflatten(2, (heads, size)) if is_flat else tensor
        turned, rest = heads_apart.split([rotated_size, size - rotated_size], -1)
        if interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        real, imaginary = first * cos - second * sin, first * sin + second * cos
        if interleaved:
            found = torch.stack((real, imaginary), -1).flatten(-2)
        else:
            found = torch.cat((real, imaginary), -1)
        if rotated_size < size:
            found = torch.cat((found, rest), -1)
        return found.flatten(2) if is_flat else found

    return rotate


def attention(given: Inputs) -> Function:
    """Query [B, QH, N, D]; key and value [B, KH, S, D]; mask [B or 1, 1, N, S], bool or added to scores.

    Query heads that share keys become rows of one head, because torch's kernels with a mask would copy keys
    and values for each of them.
    """
    unknown = {
        name: given.get(name, 0)
        for name in ("is_causal", "softcap", "qk_matmul_output_mode", "q_num_heads", "kv_num_heads")
        if given.get(name, 0)
    }
    if unknown or any(given.node.inputs[4:]) or any(given.node.outputs[1:]):
        raise ValueError(f"an Attention of another form: {unknown or 'with further inputs or outputs'}")
    batch, heads, count, size = given.shape(0)
    kv_heads = given.shape(1)[1]
    scale, groups = given.get("scale", None), heads // kv_heads

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if groups == 1:
            return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        rows = query.reshape(batch, kv_heads, groups * count, size)
        if mask is not None:
            mask = mask.repeat(1, 1, groups, 1)
        found = F.scaled_dot_product_attention(rows, key, value, mask, scale=scale)
        return found.reshape(batch, heads, count, -1)

    return attend


PACKED_PRODUCT = "PackedInt4Product"
BLOCK_SIZES = (32, 64, 128, 256)
# The kernels read codes from 0 to 15, of which this one stands for 0.
ZERO_CODE = 8
# Columns have to be a multiple of this.
GPU_COLUMNS, CPU_COLUMNS = 8, 16
# Tiles of 16 rows that a thread of a GPU reads at once; the largest that divides the rows is fastest.
INNER_TILES = (8, 4, 2)


def pack_products(graph: Graph, device: TorchDevice) -> tuple[Graph, dict[str, Tensor]]:
    """Replace the products with int4 weights that a kernel of the device takes.

    Returns the graph, and the packed weights and their scales in the device's memory by name.
    """
    dequantized = {node.outputs[0]: node for node in graph.nodes if node.operator == "DequantizeLinear"}
    packed: dict[str, Tensor] = {}
    nodes = []
    for node in graph.nodes:
        source = dequantized.get(node.inputs[1]) if node.operator == "MatMul" else None
        if source is None or not _fits(source, graph, device):
            nodes.append(node)
            continue
        names = [f"{source.outputs[0]}.{name}" for name in ("packed", "scales")]
        if names[0] not in packed:
            codes, scales = (graph.constants[name] for name in source.inputs)
            packed |= dict(zip(names, _pack(codes, scales, device), strict=True))
        attributes = {"block_size": source.attributes["block_size"]}
        nodes.append(Node(node.name, PACKED_PRODUCT, (node.inputs[0], *names), node.outputs, attributes))
    read = {name for node in nodes for name in node.inputs}
    nodes = [node for node in nodes if node.operator != "DequantizeLinear" or node.outputs[0] in read]
    return replace(graph, nodes=tuple(nodes)), packed


def packed_product(given: Inputs) -> Function:
    """Rows [..., K]; a packed matrix of K rows and N columns; scales and zeros [K / block, N, 2]."""
    block_size, columns = given.get("block_size", 0), given.shape(2)[1]

    def multiply(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        if rows.is_cuda:
            found = torch._weight_int4pack_mm(rows.to(scales.dtype), packed, block_size, scales)
            return found.to(rows.dtype)
        return torch._weight_int4pack_mm_for_cpu(rows, packed, block_size, scales)

    def product(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        shape = (*rows.shape[:-1], columns)
        if rows.is_meta:
            return rows.new_empty(shape)
        return multiply(rows.reshape(-1, rows.shape[-1]), packed, scales).view(shape)

    return product


def _fits(node: Node, graph: Graph, device: TorchDevice) -> bool:
    """Whether a kernel of the device takes what a DequantizeLinear restores."""
    attributes: Any = node.attributes
    is_constant = all(name in graph.constants for name in node.inputs)
    if not is_constant or len(node.inputs) != 2 or attributes.get("axis", 1) != 0:
        return False
    codes, scales = (graph.constants[name] for name in node.inputs)
    if codes.dim() != 2 or attributes.get("block_size", 0) not in BLOCK_SIZES:
        return False
    if device.is_gpu and not torch.equal(scales.bfloat16().to(scales.dtype), scales):
        return False
    if codes.shape[1] % (GPU_COLUMNS if device.is_gpu else CPU_COLUMNS):
        return False
    return bool(codes.min() >= -ZERO_CODE and codes.max() < ZERO_CODE)


def _pack(codes: Tensor, scales: Tensor, device: TorchDevice) -> tuple[Tensor, Tensor]:
    """Codes [K, N] and scales [K / block, N] as the kernels read them; the zero of every block is 0."""
    turned = codes.T + ZERO_CODE
    if device.is_gpu:
        scales = scales.bfloat16()
        tiles = next(count for count in INNER_TILES if codes.shape[0] % (16 * count) == 0)
        pairs = turned[:, ::2].to(torch.uint8) << 4 | turned[:, 1::2].to(torch.uint8)
        packed = device.put(pairs, lambda given: torch._convert_weight_to_int4pack(given, tiles))
    else:
        packed = device.put(turned.int(), lambda given: torch._convert_weight_to_int4pack_for_cpu(given, 1))
    return packed, device.put(torch.stack((scales, torch.zeros_like(scales)), -1))
