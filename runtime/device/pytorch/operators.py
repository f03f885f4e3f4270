"""The operators of ONNX, opset 24, as functions of torch tensors.

``OPERATORS`` has a record for every operator that the exporter writes, and for the packed products with int4
weights (``layers``). A record makes the function of one node for inputs of fixed shapes. What decides over
shapes (axes, sizes, bounds) is read when the function is made, so that a call puts work on the device's
stream and never waits for a value of it.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.device.pytorch import layers
from runtime.device.pytorch.graph import TORCH_TYPES, Function, Inputs, Operator
from runtime.device.pytorch.layers import PACKED_PRODUCT, packed_product

# Rows of at most so many values are sorted as a whole, equal ones by their places.
MAX_SORTED = 4096


def _plain(function: Function) -> Operator:
    """Of an operator without attributes that is one function of torch."""
    return Operator(lambda _: function)


def _divide(given: Inputs) -> Function:
    first = given.tensors[0]
    assert first is not None
    return torch.div if first.is_floating_point() else partial(torch.div, rounding_mode="trunc")


def _modulo(given: Inputs) -> Function:
    return torch.fmod if given.get("fmod", 0) else torch.remainder


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    def apply(first: Tensor, *others: Tensor) -> Tensor:
        for other in others:
            first = function(first, other)
        return first

    return _plain(apply)


def _cast(given: Inputs) -> Function:
    dtype = TORCH_TYPES[given.get("to", 0)]
    return lambda tensor: tensor.to(dtype)


def _concat(given: Inputs) -> Function:
    axis = given.axis(0)
    return lambda *tensors: torch.cat(tensors, axis)


def _constant(given: Inputs) -> Function:
    (name,) = given.node.attributes
    value = given.get(name, None)
    types = {"f": torch.float32, "i": torch.int64}
    found = value if name == "value" else torch.tensor(value, dtype=types[name.removeprefix("value_")[0]])
    return lambda: found


def _constant_of_shape(given: Inputs) -> Function:
    shape, value = given.numbers(0), given.get("value", torch.zeros(1))
    return lambda: value.reshape(()).expand(shape).clone()


def _range(given: Inputs) -> Function:
    start, limit, step = (given.values[index] for index in range(3))
    return lambda: torch.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


def _expand(given: Inputs) -> Function:
    shape = torch.broadcast_shapes(given.shape(), given.numbers(1) or [])
    return lambda tensor: tensor.expand(shape)


def _tile(given: Inputs) -> Function:
    repeats = given.numbers(1) or []
    return lambda tensor: tensor.repeat(repeats)


def _reshape(given: Inputs) -> Function:
    shape, old = given.numbers(1) or [], given.shape()
    if not given.get("allowzero", 0):
        shape = [size or old[index] for index, size in enumerate(shape)]
    return lambda tensor: tensor.reshape(shape)


def _flatten(given: Inputs) -> Function:
    axis = given.get("axis", 1)
    shape = math.prod(given.shape()[:axis]), math.prod(given.shape()[axis:])
    return lambda tensor: tensor.reshape(shape)


def _squeeze(given: Inputs) -> Function:
    axes, old = given.numbers(1), given.shape()
    chosen = [a % len(old) for a in axes] if axes else [a for a, size in enumerate(old) if size == 1]
    shape = [size for axis, size in enumerate(old) if axis not in chosen]
    return lambda tensor: tensor.reshape(shape)


def _unsqueeze(given: Inputs) -> Function:
    axes, shape = given.numbers(1) or [], given.shape()
    rank = len(shape) + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        shape.insert(axis, 1)
    return lambda tensor: tensor.reshape(shape)


def _transpose(given: Inputs) -> Function:
    order = given.get("perm", None) or list(reversed(range(len(given.shape()))))
    return lambda tensor: tensor.permute(order)


def _slice(given: Inputs) -> Function:
    shape, starts, ends = given.shape(), given.numbers(1) or [], given.numbers(2) or []
    axes, steps = given.numbers(3) or list(range(len(starts))), given.numbers(4) or [1] * len(starts)
    index = [slice(None)] * len(shape)
    flipped = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis %= len(shape)
        kept = range(shape[axis])[slice(start, None if step < 0 and end < -shape[axis] else end, step)]
        if step < 0:  # torch slices forwards only
            kept = kept[::-1]
            flipped.append(axis)
        index[axis] = slice(kept.start, max(kept.stop, kept.start), kept.step)
    key = tuple(index)
    if flipped:
        return lambda tensor: tensor[key].flip(flipped)
    return lambda tensor: tensor[key]


def _split(given: Inputs) -> Function:
    axis, sizes = given.axis(0), given.numbers(1)
    if sizes is None:
        total = given.shape()[axis]
        size = -(-total // len(given.node.outputs))
        sizes = [min(size, total - start) for start in range(0, total, size)]
    return lambda tensor: torch.split(tensor, sizes, axis)


def _pad(given: Inputs) -> Function:
    if given.get("mode", "constant") != "constant":
        raise ValueError(f"the mode {given.get('mode', None)!r} of Pad")
    pads, rank = given.numbers(1) or [], len(given.shape())
    axes = [axis % rank for axis in given.numbers(3) or range(rank)]
    around = {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    # torch begins with the last axis.
    amounts = [size for axis in reversed(range(rank)) for size in around.get(axis, (0, 0))]
    value = given.values[2].item() if 2 in given.values else 0
    return lambda tensor: F.pad(tensor, amounts, value=value)


def _gather(given: Inputs) -> Function:
    axis, shape = given.axis(0), given.shape(1)
    if not shape and 1 in given.values:
        index = int(given.values[1].item())
        return lambda tensor, _: tensor.select(axis, index)
    if not shape:
        # torch would read a single index as a number, which waits for the device.
        return lambda tensor, indices: tensor.index_select(axis, indices.reshape(1)).squeeze(axis)
    before = (slice(None),) * axis
    return lambda tensor, indices: tensor[(*before, indices)]


def _gather_elements(given: Inputs) -> Function:
    axis = given.axis(0)
    return lambda tensor, indices: torch.gather(tensor, axis, indices)


def _gather_nd(given: Inputs) -> Function:
    if given.get("batch_dims", 0):
        raise ValueError("the attribute batch_dims of GatherND")
    return lambda tensor, indices: tensor[indices.unbind(-1)]


def _scatter_elements(given: Inputs) -> Function:
    axis, reduction = given.axis(0), given.get("reduction", "none")
    if reduction == "none":
        return lambda tensor, indices, updates: tensor.scatter(axis, indices, updates)
    names = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    name = names[reduction]
    return lambda tensor, indices, updates: tensor.scatter_reduce(axis, indices, updates, name)


def _scatter_nd(given: Inputs) -> Function:
    if given.get("reduction", "none") != "none":
        raise ValueError("the attribute reduction of ScatterND")
    return lambda tensor, indices, updates: tensor.index_put(indices.unbind(-1), updates)


def _tensor_scatter(given: Inputs) -> Function:
    """Writes in place of its first input, so that a cache is never copied."""
    if given.get("axis", -2) % len(given.shape()) != 2 or given.get("mode", "linear") != "linear":
        raise ValueError("a TensorScatter along another axis than 2, or one that is circular")
    batch, count = given.shape(1)[0], given.shape(1)[2]

    def write(past: Tensor, update: Tensor, start: Tensor | None = None) -> Tensor:
        rows = torch.arange(count, device=past.device)
        if start is not None:
            rows = rows + start.unsqueeze(1)
        sequences = torch.arange(batch, device=past.device).unsqueeze(1)
        past.transpose(1, 2).index_put_((sequences, rows), update.transpose(1, 2))
        return past

    return write


def _dequantize_linear(given: Inputs) -> Function:
    """Codes [K, N] and scales: [K / block, N] along axis 0, or one for each place of the axis."""
    axis, block_size = given.axis(1), given.get("block_size", 0)
    if len(given.tensors) > 2:
        raise ValueError("a DequantizeLinear with zero points")

    def restore(codes: Tensor, scales: Tensor) -> Tensor:
        if block_size:
            scales = scales.repeat_interleave(block_size, axis)
        elif scales.dim() == 1:
            scales = scales.reshape([-1 if each == axis else 1 for each in range(codes.dim())])
        return codes.to(scales.dtype) * scales

    return restore


def _cumulative_sum(given: Inputs) -> Function:
    if given.get("exclusive", 0) or given.get("reverse", 0):
        raise ValueError("an exclusive or reversed CumSum")
    axis, tensor = int(given.values[1].item()), given.tensors[0]
    assert tensor is not None
    dtype = tensor.dtype
    return lambda tensor: torch.cumsum(tensor, axis, dtype=dtype)


def _reduced(function: Callable[..., Tensor]) -> Operator:
    def make(given: Inputs) -> Function:
        axes, keep = given.numbers(1) or given.get("axes", None), bool(given.get("keepdims", 1))
        if not axes:
            if given.get("noop_with_empty_axes", 0):
                return lambda tensor: tensor
            axes = list(range(len(given.shape())))
        return lambda tensor: function(tensor, axes, keep)

    return Operator(make, fixed=(1,))


def _sum(tensor: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.sum(tensor, axes, keep, dtype=tensor.dtype)


def _arg(function: Callable[..., Tensor]) -> Operator:
    def make(given: Inputs) -> Function:
        if given.get("select_last_index", 0):
            raise ValueError("the attribute select_last_index")
        axis, keep = given.axis(0), bool(given.get("keepdims", 1))
        return lambda tensor: function(tensor, axis, keep)

    return Operator(make)


def _top_k(given: Inputs) -> Function:
    axis, count, largest = given.axis(-1), int(given.values[1].item()), bool(given.get("largest", 1))
    is_short = given.shape()[axis] <= MAX_SORTED

    def ordered(tensor: Tensor) -> tuple[Tensor, Tensor]:
        """ONNX puts the first of equal values first."""
        values, places = torch.sort(tensor, dim=axis, descending=largest, stable=True)
        return values.narrow(axis, 0, count), places.narrow(axis, 0, count)

    def chosen(tensor: Tensor) -> tuple[Tensor, Tensor]:
        # torch takes any of those that equal the last one. The others are put in order.
        places = torch.topk(tensor, count, axis, largest, sorted=False).indices.sort(dim=axis).values
        values, order = ordered(tensor.gather(axis, places))
        return values, places.gather(axis, order)

    return ordered if is_short else chosen


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def make(given: Inputs) -> Function:
        axis = given.axis(-1)
        return lambda tensor: function(tensor, axis)

    return Operator(make)


def _gelu(given: Inputs) -> Function:
    approximate = given.get("approximate", "none")
    return lambda tensor: F.gelu(tensor, approximate=approximate)


def _clip(tensor: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return torch.clamp(tensor, low, high)


OPERATORS: dict[str, Operator] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "And": _plain(torch.logical_and),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "Attention": Operator(layers.attention),
    "Cast": Operator(_cast),
    "Ceil": _plain(torch.ceil),
    "Clip": _plain(_clip),
    "Concat": Operator(_concat),
    "Constant": Operator(_constant),
    "ConstantOfShape": Operator(_constant_of_shape, fixed=(0,)),
    "Cos": _plain(torch.cos),
    "CumSum": Operator(_cumulative_sum, fixed=(1,)),
    "DequantizeLinear": Operator(_dequantize_linear),
    "Div": Operator(_divide),
    "Equal": _plain(torch.eq),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Expand": Operator(_expand, fixed=(1,)),
    "Flatten": Operator(_flatten),
    "Floor": _plain(torch.floor),
    "Gather": Operator(_gather),
    "GatherElements": Operator(_gather_elements),
    "GatherND": Operator(_gather_nd),
    "Gelu": Operator(_gelu),
    "Gemm": Operator(layers.gemm),
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Identity": _plain(lambda tensor: tensor),
    "IsInf": _plain(torch.isinf),
    "IsNaN": _plain(torch.isnan),
    "LayerNormalization": Operator(layers.layer_normalization),
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "Log": _plain(torch.log),
    "LogSoftmax": _softmax(torch.log_softmax),
    "MatMul": _plain(torch.matmul),
    "Max": _variadic(torch.maximum),
    "Min": _variadic(torch.minimum),
    "Mod": Operator(_modulo),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "Pad": Operator(_pad, fixed=(1, 2, 3)),
    "Pow": _plain(torch.pow),
    "RMSNormalization": Operator(layers.rms_normalization),
    "Range": Operator(_range, fixed=(0, 1, 2)),
    "Reciprocal": _plain(torch.reciprocal),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMean": _reduced(torch.mean),
    "ReduceMin": _reduced(torch.amin),
    "ReduceSum": _reduced(_sum),
    "Relu": _plain(torch.relu),
    "Reshape": Operator(_reshape, fixed=(1,)),
    "RotaryEmbedding": Operator(layers.rotary_embedding),
    "ScatterElements": Operator(_scatter_elements),
    "ScatterND": Operator(_scatter_nd),
    "Sigmoid": _plain(torch.sigmoid),
    "Sin": _plain(torch.sin),
    "Slice": Operator(_slice, fixed=(1, 2, 3, 4)),
    "Softmax": _softmax(torch.softmax),
    "Softplus": _plain(F.softplus),
    "Split": Operator(_split, fixed=(1,)),
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": Operator(_squeeze, fixed=(1,)),
    "Sub": _plain(torch.sub),
    "Tanh": _plain(torch.tanh),
    "TensorScatter": Operator(_tensor_scatter),
    "Tile": Operator(_tile, fixed=(1,)),
    "TopK": Operator(_top_k, fixed=(1,)),
    "Transpose": Operator(_transpose),
    "Unsqueeze": Operator(_unsqueeze, fixed=(1,)),
    "Where": _plain(torch.where),
    "Xor": _plain(torch.logical_xor),
    PACKED_PRODUCT: Operator(packed_product),
}
