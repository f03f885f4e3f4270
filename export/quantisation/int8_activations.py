"""Products of int8 activations with int8 weights: the factors that prepare both, and the graph that has them.

An engine rounds the activations of a row with one scale, and the weights of a column with one scale; so their
sums are whole numbers, the same in any order and beside any other row. A few channels of activations are much
larger than the others, and would take most of the 8 bits for themselves. They are divided by a factor, and
their weights multiplied by it, which changes no sum (SmoothQuant: Xiao et al., arXiv 2211.10438, equation 4,
with alpha 0.5).

Every such product is DequantizeLinear and MatMul in float32 in a graph of standard operators. In its second
form, ``backbone.int8.onnx``, an input [..., K] is divided by its rows' largest magnitudes, rounded to uint8
around 128, multiplied by ``com.microsoft.MatMulIntegerToFloat``, and multiplied by the magnitudes again.
Activations are unsigned because ONNX Runtime's kernel for signed ones is many times slower.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn

from export.quantisation.quality import CALIBRATION, token_ids
from export.quantisation.weights import digest
from export.source import Source

# As many tokens as the text of the package has with a small vocabulary.
CALIBRATION_TOKENS = 2048
LARGEST_CODE = 127
# A channel that the text never uses, or that no weight reads, has a factor nevertheless.
SMALLEST = 1e-5


@dataclass(frozen=True)
class SmoothedProducts:
    """The products of a model that an engine can compute with activations in int8.

    factors: by the digest of a weight [K, N]: the factors [K], float32, by which its rows are multiplied and
        its activations divided
    modules: the module of every product, with the digest of its weight
    """

    factors: Mapping[str, NDArray[np.float32]]
    modules: tuple[tuple[nn.Linear, str], ...]

    @contextmanager
    def rounding_activations(self, quantized: Collection[str]) -> Iterator[None]:
        """Let modules round their activations as an engine does: the codes of a row share a scale.

        quantized: the digests of the weights that were quantised
        """

        def hook(factors: Tensor) -> Callable[..., tuple[Any, ...]]:
            return lambda _, inputs: (_rounded_rows(inputs[0], factors), *inputs[1:])

        handles = [
            module.register_forward_pre_hook(hook(torch.from_numpy(self.factors[key])))
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
    """The factors of all linear layers of the target model, by its activations on a text.

    text: a UTF-8 file; None takes the text that comes with the package
    Matrices that no ``nn.Linear`` holds, such as experts side by side, have no factors. Raises ExportError.
    """
    ids = token_ids(source, CALIBRATION, text, CALIBRATION_TOKENS)
    groups = _largest_activations(source.model, ids)
    factors: dict[str, NDArray[np.float32]] = {}
    modules = []
    for activations, members in groups:
        weights = torch.stack([member.weight.abs().amax(0) for member in members]).amax(0)
        shared = (activations.clamp(min=SMALLEST) / weights.clamp(min=SMALLEST)).sqrt().float()
        for member in members:
            key = digest(member.weight.numpy().T)
            factors[key] = shared.numpy()
            modules.append((member, key))
    return SmoothedProducts(factors, tuple(modules))


def _largest_activations(model: Any, ids: Tensor) -> list[tuple[Tensor, list[nn.Linear]]]:
    """The largest magnitude [K] of every channel that linear layers read, with the layers that share it."""
    groups: list[tuple[Tensor, list[nn.Linear]]] = []
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
            groups.append((hidden.detach().abs().flatten(0, -2).amax(0), []))
        groups[-1][1].append(module)

    handles = [m.register_forward_pre_hook(record) for m in model.modules() if isinstance(m, nn.Linear)]
    try:
        model.set_attn_implementation("eager")
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return groups


def _rounded_rows(hidden: Tensor, factors: Tensor) -> Tensor:
    """Activations [..., K], each row rounded to int8 after the division by the factors."""
    divided = hidden / factors
    scales = (divided.abs().amax(-1, keepdim=True) / LARGEST_CODE).clamp(min=torch.finfo(hidden.dtype).tiny)
    return (divided / scales).round() * scales * factors


DOMAIN = "com.microsoft"
ZERO = 128


def write_integer_graph(path: Path, result: Path) -> None:
    """Write the second form of the graph ``path``; both share the file of weights."""
    model = ir.load(path)
    multiply_integers(model)
    ir.save(model, result)


def multiply_integers(model: ir.Model) -> int:
    """Replace the products of whole int8 columns, in place; returns their number.

    A row of zeros is divided by zero. Its codes are those of no number, and mean nothing, because the product
    is multiplied by zero in the end.
    """
    graph = model.graph
    constants: dict[str, ir.Value] = {}
    rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
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
        operands = [codes, weights.inputs[0], constants["step"], weights.inputs[1], constants["zero_point"]]
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
