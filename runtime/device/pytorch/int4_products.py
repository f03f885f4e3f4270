"""Products with int4 weights by PyTorch's own kernels, which read the codes and never a dequantised matrix.

A graph has DequantizeLinear, codes [K, N] with one scale for each block of rows, and MatMul. The two become
one node ``PACKED_PRODUCT`` where a kernel takes the matrix. The kernel of GPUs multiplies bfloat16 alone:
rows of another type are rounded to it, and scales have to be values of it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.device.pytorch.device import TorchDevice
from runtime.device.pytorch.graph import Function, Graph, Inputs, Node

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
