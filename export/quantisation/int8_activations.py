"""Products of int8 activations with int8 weights: the smoothing before both are rounded, and their graph.

An engine rounds the activations of a row with one scale, and the weights of a column with one scale; so their
sums are whole numbers, the same in any order and beside any other row. A few channels of activations are much
larger than the others, and would take most of the 8 bits for themselves. They are divided by a factor, and
their weights multiplied by it, which changes no sum (SmoothQuant: Xiao et al., arXiv 2211.10438, equation 4).
The exponent alpha of the factors is chosen for each input of products, by the noise that rounding adds to
their results on a text. What is large in one row alone has no such channel. Noise of one layer adds to that
of the next, so where a model has much of it, the inputs that gain most are rotated, too: a Hadamard matrix
spreads a large number over 64 neighbours, and the weights are rotated likewise (QuaRot: Ashkboos et al.,
arXiv 2404.00456).

Every such product is DequantizeLinear and MatMul in float32 in a graph of standard operators. In its second
form, ``backbone.int8.onnx``, an input [..., K] is divided by its rows' largest magnitudes, rounded to uint8
around 128, multiplied by ``com.microsoft.MatMulIntegerToFloat``, and multiplied by the magnitudes again.
Activations are unsigned because ONNX Runtime's kernel for signed ones is many times slower. Its twin
``backbone.uint8.onnx`` has unsigned weights too, for processors on which products with signed ones overflow.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from export.quantisation.quality import CALIBRATION, token_ids
from export.quantisation.weights import ROTATED, Smoothing, digest, hadamard
from export.source import Source

# As many tokens as the text of the package has with a small vocabulary.
CALIBRATION_TOKENS = 2048
# By so many of them, and so many columns of the weights, noise is estimated.
SAMPLED_ROWS, SAMPLED_COLUMNS = 256, 1024
LARGEST_CODE = 127
# A channel that the text never uses, or that no weight reads, has a factor nevertheless.
SMALLEST = 1e-5
ALPHAS = (0.5, 0.3, 0.4, 0.6, 0.7, 0.8)
# The noise of a model's products, each as a share of its power, summed: inputs are rotated until there is no
# more. SmolLM2-135M-Instruct has more in its 30 layers. The demo's model has less in its 6, and is faster
# without rotations.
MOST_NOISE = 0.014


@dataclass(frozen=True)
class SmoothedProducts:
    """The products of a model that an engine can compute with activations in int8.

    smoothings: by the digest of a weight [K, N]
    modules: the module of every such product, with the digest of its weight
    """

    smoothings: Mapping[str, Smoothing]
    modules: tuple[tuple[nn.Linear, str], ...]

    @contextmanager
    def rounding_activations(self, quantized: Collection[str]) -> Iterator[None]:
        """Let modules round their activations as an engine does: the codes of a row share a scale.

        quantized: the digests of the weights that were quantised
        """

        def hook(smoothing: Smoothing) -> Callable[..., tuple[Any, ...]]:
            return lambda _, inputs: (_rounded_rows(inputs[0], smoothing), *inputs[1:])

        handles = [
            module.register_forward_pre_hook(hook(self.smoothings[key]))
            for module, key in self.modules
            if key in quantized
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def smooth_products(source: Source, text: Path | None) -> SmoothedProducts:
    """How the linear layers of the target model are smoothed, by its activations on a text.

    text: a UTF-8 file; None takes the text that comes with the package
    Matrices that no ``nn.Linear`` holds, such as experts side by side, are not smoothed. Raises ExportError.
    """
    ids = token_ids(source, CALIBRATION, text, CALIBRATION_TOKENS)
    groups = _inputs_of_products(source.model, ids)
    tried = [candidates(inputs) for inputs in groups]
    chosen = [min(each for each in found if not each.smoothing.is_rotated) for found in tried]
    gains = [of_group.noise - min(found).noise for of_group, found in zip(chosen, tried, strict=True)]
    total = sum(each.noise for each in chosen)
    for index in sorted(range(len(groups)), key=lambda index: -gains[index]):
        if total <= MOST_NOISE:
            break
        chosen[index] = min(tried[index])
        total -= gains[index]
    smoothings: dict[str, Smoothing] = {}
    modules: list[tuple[nn.Linear, str]] = []
    for inputs, candidate in zip(groups, chosen, strict=True):
        keys = [digest(member.weight.numpy().T) for member in inputs.members]
        smoothings.update(dict.fromkeys(keys, candidate.smoothing))
        modules += zip(inputs.members, keys, strict=True)
    return SmoothedProducts(smoothings, tuple(modules))


@dataclass
class Inputs:
    """The activations that some linear layers read, such as those of Q, K and V.

    largest: the largest magnitude [K] of every channel
    rows: a sample [T, K] of the activations
    """

    largest: Tensor
    rows: Tensor
    members: list[nn.Linear]


def _inputs_of_products(model: Any, ids: Tensor) -> list[Inputs]:
    groups: list[Inputs] = []
    read: list[Tensor] = []
    seen: set[int] = set()

    def record(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Linear)
        hidden = inputs[0]
        if id(module) in seen:
            return
        seen.add(id(module))
        # Layers that share their input, such as those of Q, K and V, are called one after the other.
        if not read or read[-1] is not hidden:
            read[:] = [hidden]
            rows = hidden.detach().flatten(0, -2)
            groups.append(Inputs(rows.abs().amax(0), _sample(rows, SAMPLED_ROWS).clone(), []))
        groups[-1].members.append(module)

    handles = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return groups


def _sample(rows: Tensor, count: int) -> Tensor:
    """At most so many rows, evenly spread."""
    return rows[:: max(1, len(rows) // count)][:count]


@dataclass(frozen=True, order=True)
class Candidate:
    """A smoothing, and the noise that rounding adds to products after it, as a share of their power."""

    noise: float
    smoothing: Smoothing = field(compare=False)


def candidates(inputs: Inputs) -> list[Candidate]:
    """Every smoothing that is tried for some products.

    Rounding by steps of a scale adds a twelfth of its square to every number. A row's scale is its largest
    number over 127, and so is a column's.
    """
    weights = torch.cat([member.weight for member in inputs.members])
    heaviest = weights.abs().amax(0).clamp(min=SMALLEST)
    power = (inputs.rows @ _sample(weights, SAMPLED_COLUMNS).T).square().sum(-1)
    power = power.clamp(min=torch.finfo(power.dtype).tiny)
    found = []
    for alpha, is_rotated in product((*ALPHAS, None), (False, True)):
        if is_rotated and len(heaviest) % ROTATED:
            continue
        factors = torch.ones_like(heaviest)
        if alpha is not None:
            factors = inputs.largest.clamp(min=SMALLEST) ** alpha / heaviest ** (1 - alpha)
        rows, columns = inputs.rows / factors, _sample(weights, SAMPLED_COLUMNS) * factors
        if is_rotated:
            rows, columns = _rotated(rows), _rotated(columns)
        of_rows = rows.abs().amax(-1).square() * columns.square().sum()
        of_columns = rows.square().sum(-1) * columns.abs().amax(-1).square().sum()
        noise = float(((of_rows + of_columns) / power).mean() / (12 * LARGEST_CODE**2))
        smoothing = Smoothing(None if alpha is None else factors.float().numpy(), is_rotated)
        found.append(Candidate(noise, smoothing))
    return found


def _rotated(rows: Tensor) -> Tensor:
    """[..., K], every 64 neighbours multiplied by the Hadamard matrix."""
    return (rows.unflatten(-1, (-1, ROTATED)) @ torch.from_numpy(hadamard())).flatten(-2)


def _rounded_rows(hidden: Tensor, smoothing: Smoothing) -> Tensor:
    """Activations [..., K], of which each row was rounded to int8 after the smoothing."""
    factors = torch.ones(()) if smoothing.factors is None else torch.from_numpy(smoothing.factors)
    rows = hidden / factors
    rows = _rotated(rows) if smoothing.is_rotated else rows
    scales = (rows.abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=torch.finfo(hidden.dtype).tiny)
    rounded = (rows / scales).round() * scales
    return (_rotated(rounded) if smoothing.is_rotated else rounded) * factors


DOMAIN = "com.microsoft"
ZERO = 128


def write_integer_graph(path: Path, result: Path, *, unsigned: bool) -> None:
    """Write a second form of the graph ``path``, which shares its file of weights.

    unsigned: as of ``multiply_integers``
    """
    model = ir.load(path)
    multiply_integers(model, unsigned=unsigned)
    ir.save(model, result)


def multiply_integers(model: ir.Model, *, unsigned: bool) -> int:
    """Replace the products of whole int8 columns, in place; returns their number.

    unsigned: weights are uint8 around 128. The graph makes them from the bytes of the signed ones, which an
        engine does once, when it loads the graph.

    A row of zeros is divided by zero. Its codes are those of no number, and mean nothing, because the product
    is multiplied by zero in the end.
    """
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    flipped: dict[ir.Value, ir.Value] = {}
    count = 0
    for node in list(graph):
        weights = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] else None
        if weights is None or not _has_columns_of_int8(weights):
            continue
        if not constants:
            constants = _register_constants(graph)
        rows = node.inputs[0]
        assert rows is not None
        if rows not in rounded:
            rounded[rows] = _add_rounding(graph, node, rows, constants)
        codes, largest = rounded[rows]
        signed, scales = weights.inputs
        assert signed is not None
        operands = [codes, signed, constants["step"], scales, constants["zero_point"]]
        if unsigned:
            if signed not in flipped:
                flipped[signed] = _as_unsigned(graph, node, signed, constants["zero_point"])
            operands[1] = flipped[signed]
            operands.append(constants["zero_point"])
        product = ir.node("MatMulIntegerToFloat", operands, domain=DOMAIN)
        scaled = ir.node("Mul", [product.outputs[0], largest])
        old, new = node.outputs[0], scaled.outputs[0]
        _describe(product.outputs[0], f"{old.name}_of_codes", old.dtype, old.shape)
        _describe(new, old.name, old.dtype, old.shape)
        ir.convenience.replace_nodes_and_values(graph, node, [node], [product, scaled], [old], [new])
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
    RemoveUnusedNodesPass()(model)
    return count


def _has_columns_of_int8(node: ir.Node) -> bool:
    codes = node.inputs[0]
    whole = node.op_type == "DequantizeLinear" and "block_size" not in node.attributes
    return whole and codes is not None and codes.dtype == ir.DataType.INT8


def _as_unsigned(graph: ir.Graph, before: ir.Node, signed: ir.Value, zero_point: ir.Value) -> ir.Value:
    """Codes from 1 to 255, of those from -127 to 127: the same bytes but for the highest bit."""
    stored = signed.const_value
    if isinstance(stored, ir.ExternalTensor):
        raw: ir.TensorProtocol = ir.ExternalTensor(
            stored.location,
            stored.offset,
            stored.length,
            ir.DataType.UINT8,
            shape=stored.shape,
            name=f"{signed.name}_bytes",
            base_dir=stored.base_dir,
        )
    else:
        assert stored is not None
        raw = ir.tensor(stored.numpy().view(np.uint8), name=f"{signed.name}_bytes")
    value = ir.val(raw.name, const_value=raw)
    graph.register_initializer(value)
    flipped = ir.node("BitwiseXor", [value, zero_point])
    _describe(flipped.outputs[0], f"{signed.name}_unsigned", ir.DataType.UINT8, signed.shape)
    graph.insert_before(before, [flipped])
    return flipped.outputs[0]


def _register_constants(graph: ir.Graph) -> dict[str, ir.Value]:
    arrays: dict[str, NDArray[Any] | np.generic] = {
        "step": np.float32(1 / LARGEST_CODE),
        "zero_point": np.uint8(ZERO),
        "last_axis": np.array([-1], np.int64),
    }
    values = {name: ir.val(f"int8_{name}", const_value=ir.tensor(array)) for name, array in arrays.items()}
    for value in values.values():
        graph.register_initializer(value)
    return values


def _add_rounding(
    graph: ir.Graph, before: ir.Node, rows: ir.Value, constants: dict[str, ir.Value]
) -> tuple[ir.Value, ir.Value]:
    """Codes [..., K] uint8 and largest magnitudes [..., 1] of rows [..., K]."""
    magnitudes = ir.node("Abs", [rows])
    largest = ir.node("ReduceMax", [magnitudes.outputs[0], constants["last_axis"]], {"keepdims": 1})
    divided = ir.node("Div", [rows, largest.outputs[0]])
    codes = ir.node("QuantizeLinear", [divided.outputs[0], constants["step"], constants["zero_point"]])
    exact = (magnitudes, largest, divided)
    for node, name in zip((*exact, codes), ("magnitudes", "largest", "divided", "codes"), strict=True):
        dtype = rows.dtype if node in exact else ir.DataType.UINT8
        shape = rows.shape if node is not largest else None
        _describe(node.outputs[0], f"{rows.name}_{name}", dtype, shape)
    graph.insert_before(before, [*exact, codes])
    return codes.outputs[0], largest.outputs[0]


def _describe(value: ir.Value, name: str | None, dtype: ir.DataType | None, shape: ir.Shape | None) -> None:
    value.name, value.shape = name, shape
    if dtype is not None:
        value.dtype = dtype
