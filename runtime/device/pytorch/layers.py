"""The operators of a model's layers as functions of torch tensors: products, norms, rotation, attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.device.pytorch.graph import Function, Inputs


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
