"""From a torch module to a graph of standard ONNX operators in memory, whose tensors a contract names.

torch.export traces the module; passes over the graph fuse, share and name what it leaves open.
"""

import gc
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch._dynamo.config
from numpy.typing import NDArray
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions
from torch import nn
from transformers.utils.logging import disable_progress_bar

from export.errors import ExportError
from export.graphs.torch_exporter import needless_work_left_out
from export.nodes import constant
from runtime.core.bundle import GraphSpec

OPSET = 24
# How torch.export names the size of an axis.
SYMBOL = re.compile(r"\b[su]\d+\b")
# Example sizes of the open axes. They differ from each other, because the trace could take equal sizes for
# one axis, and none is 1, which the trace would fix. P is Q + N, and no drafter with an axis T has fewer than
# two frames.
EXAMPLE_AXES = {
    "B": 2,
    "N": 5,
    "M": 3,
    "S": 24,
    "A": 6,
    "Q": 4,
    "P": 9,
    "T": 2,
    "W": 7,
    "L": 8,
    "E": 10,
    "K": 11,
}
# How the names of caches begin; a traced module takes them apart from its other inputs.
CACHES = ("past_key_", "past_value_")
# The example size of M0; those of M1, M2, ... (the nodes of each depth, in Hydra) follow.
FIRST_DEPTH = 30


def silence_libraries() -> None:
    """Let this process write no progress bars of Transformers, and no warnings of the exporter.

    These messages do not concern the user's model.
    """
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def trace(module: nn.Module, contract: GraphSpec, example_axes: Mapping[str, int] = EXAMPLE_AXES) -> ir.Model:
    """The ONNX graph of ``module(inputs by name, caches)``; its weights stay in torch's memory."""
    plain = [tensor.name for tensor in contract.inputs if not tensor.name.startswith(CACHES)]
    examples, axes = [], []
    for tensor in contract.inputs:
        shape = [_example(size, example_axes) if isinstance(size, str) else size for size in tensor.shape]
        fill = torch.ones if tensor.dtype == "bool" else torch.zeros
        examples.append(fill(shape, dtype=getattr(torch, tensor.dtype)))
        open_axes = (axis for axis, size in enumerate(tensor.shape) if isinstance(size, str))
        axes.append(dict.fromkeys(open_axes, torch.export.Dim.DYNAMIC))

    def arguments(flat: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return dict(zip(plain, flat, strict=False)), flat[len(plain) :]

    def exported() -> ir.Model:
        program = torch.onnx.export(
            module.eval(),
            arguments(examples),
            dynamo=True,
            opset_version=OPSET,
            input_names=[tensor.name for tensor in contract.inputs],
            output_names=[tensor.name for tensor in contract.outputs],
            dynamic_shapes=arguments(axes),
            verbose=False,
            optimize=True,
        )
        if program is None:
            raise RuntimeError("torch.onnx.export returned no program")
        return program.model

    # With open axes, PyTorch's cache of the shapes of results takes longer than computing them again.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False), _no_garbage_collection():
        try:
            with needless_work_left_out():
                return exported()
        except torch.onnx.errors.OnnxExporterError:
            # An operator of this model has an ONNX form only after it has been decomposed.
            with needless_work_left_out(trace_again=True):
                return exported()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Objects of a trace live until it ends, so that looking for garbage takes time and finds little."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trace_standard(
    module: torch.nn.Module,
    contract: GraphSpec,
    *,
    example_axes: Mapping[str, int] = EXAMPLE_AXES,
    plugins: tuple[str, ...] = (),
) -> ir.Model:
    """A module's graph in standard operators, without notes of the machine that traced it.

    example_axes: sizes of the contract's open axes, as of ``EXAMPLE_AXES``
    plugins: operators of an engine's own, with their domain, that the graph may have besides
    """
    with torch.no_grad():
        model = trace(module, contract, example_axes)
    fold_weights(model)
    share_equal_matrices(model)
    fuse_standard_operators(model)
    operators = {f"{n.domain}::{n.op_type}" for n in model.graph if n.domain not in ("", "ai.onnx")}
    foreign = sorted(operators.difference(plugins))
    if foreign:
        raise ExportError(f"only standard ONNX operators are expected, got {', '.join(foreign)}")
    strip_metadata(model)
    return model


def _example(axis: str, sizes: Mapping[str, int]) -> int:
    return sizes[axis] if axis in sizes else FIRST_DEPTH + int(axis.removeprefix("M"))


def fuse_standard_operators(model: ir.Model) -> None:
    """Turn decomposed rotary embeddings and RMS norms into the standard operators of opset 23.

    A decomposition that is not recognised stays, and is as exact.
    """
    # The library fuses only graphs of opset 23; nothing in these patterns changed with 24.
    opset = model.opset_imports[""]
    model.opset_imports[""] = 23
    try:
        onnx_fusions.fuse(model)
    finally:
        model.opset_imports[""] = opset
    # The fusion writes one cosine and sine per rotation.
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def fold_weights(model: ir.Model) -> None:
    """Compute values that depend on weights alone, such as slices of stacked matrices.

    Torch's exporter leaves large ones to be computed in every pass.
    """
    everything = 2**40
    optimizer.fold_constants(model, input_size_limit=everything, output_size_limit=everything)
    RemoveUnusedNodesPass()(model)


def share_equal_matrices(model: ir.Model) -> None:
    """Make products with equal matrices read one copy.

    Torch's exporter stores a transposed copy of a matrix for each product, and an early exit, the last layer
    and the streams all have products with the LM head.
    """
    found: dict[tuple[tuple[int, ...], bytes], list[tuple[ir.Value, NDArray[np.generic]]]] = {}
    for value in list(model.graph.initializers.values()):
        matrix = _weight(value)
        if matrix is None or not matrix.size:
            continue
        alike = found.setdefault((matrix.shape, matrix[0].tobytes()), [])
        same = next((each for each, other in alike if np.array_equal(other, matrix)), None)
        if same is None:
            alike.append((value, matrix))
            continue
        ir.convenience.replace_all_uses_with(value, same)
    RemoveUnusedNodesPass()(model)


def share_tied_embedding(model: ir.Model) -> None:
    """If the LM head is the embedding transposed, make a Gemm read the embedding itself.

    Torch's exporter stores a transposed copy, a second one of a small model's widest matrix.
    """
    tables = {node.inputs[0]: _weight(node.inputs[0]) for node in model.graph if node.op_type == "Gather"}
    for node in [node for node in model.graph if node.op_type == "MatMul"]:
        weight = _weight(node.inputs[1])
        for embedding, table in tables.items():
            if weight is None or table is None or embedding is None or table.T.shape != weight.shape:
                continue
            if np.array_equal(table.T, weight):
                _replace_by_gemm(model.graph, node, embedding, table.shape)
                break
    RemoveUnusedNodesPass()(model)


def _weight(value: ir.Value | None) -> NDArray[np.generic] | None:
    """A two-dimensional float initializer's content."""
    tensor = value.const_value if value is not None and value.is_initializer() else None
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype != ir.DataType.FLOAT:
        return None
    return tensor.numpy()


def _replace_by_gemm(graph: ir.Graph, matmul: ir.Node, embedding: ir.Value, shape: tuple[int, ...]) -> None:
    """MatMul of [..., H] becomes Reshape, Gemm with the [V, H] table transposed, Reshape."""
    hidden, result = matmul.inputs[0], matmul.outputs[0]
    rows = constant(graph, f"{result.name}_rows", np.array([-1, shape[1]], np.int64))
    labels = constant(graph, f"{result.name}_labels", np.array([shape[0]], np.int64))
    name, exact, sizes = result.name, ir.DataType.FLOAT, ir.DataType.INT64
    types = (exact, exact, sizes, sizes, exact)
    values = (ir.val(f"{name}_{number}", dtype) for number, dtype in enumerate(types))
    flat, product, leading, full, back = values
    back.shape = result.shape
    nodes = [
        ir.node("Reshape", [hidden, rows], outputs=[flat]),
        ir.node("Gemm", [flat, embedding], {"transB": 1}, outputs=[product]),
        ir.node("Shape", [hidden], {"start": 0, "end": -1}, outputs=[leading]),
        ir.node("Concat", [leading, labels], {"axis": 0}, outputs=[full]),
        ir.node("Reshape", [product, full], outputs=[back]),
    ]
    ir.convenience.replace_nodes_and_values(graph, matmul, [matmul], nodes, [result], [back])
    back.name = name


def name_axes(model: ir.Model, contract: GraphSpec) -> None:
    """Give every axis its name in the contract.

    torch.export invents a symbol for each axis of each input, so that the batch is ``s58`` in one input and
    ``s84`` in another, and an output's axis may be an expression of symbols, such as ``s11 + s14`` for M.
    Profiles and caches set an axis by its name, so it needs one name. Raises ExportError if the graph fixes
    an axis that is open in the contract, leaves one open that is fixed there, or has one symbol for two axes
    of its inputs.
    """
    values = (*model.graph.inputs, *model.graph.outputs)
    declared = list(zip(values, (*contract.inputs, *contract.outputs), strict=True))
    names: dict[str | None, str] = {}
    for value, tensor in declared:
        for found, axis in zip(value.shape or (), tensor.shape, strict=True):
            if isinstance(found, ir.SymbolicDim) and isinstance(axis, str):
                # Axes of outputs may be equal without being the same, as EAGLE's M and P are.
                fits = names.setdefault(found.value, axis) == axis or not value.is_graph_input()
            else:
                fits = found == axis
            if not fits:
                raise ExportError(f"{tensor.name}: expected the shape {tensor.shape}, got {value.shape}")

    def named(axis: Any) -> Any:
        if isinstance(axis, int) or axis.value is None:
            return axis
        return names.get(axis.value) or SYMBOL.sub(lambda found: names.get(found[0], found[0]), axis.value)

    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([named(axis) for axis in value.shape])
    for value, tensor in declared:
        value.shape = ir.Shape(tensor.shape)


def fix_capacity(model: ir.Model, capacity: int) -> None:
    """Give the axis S its size everywhere: TensorRT updates only caches whose capacity is fixed."""

    def fixed(axis: Any) -> Any:
        return capacity if isinstance(axis, ir.SymbolicDim) and axis.value == "S" else axis

    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([fixed(axis) for axis in value.shape])


def slice_caches(model: ir.Model) -> None:
    """Let a graph whose axes are named read only the first R positions of its caches.

    R is the number of the mask's columns, or of the positions that a graph without caches is given. The axis
    R takes the place of S everywhere but in the caches, which are updated as before.
    """
    graph = model.graph
    caches = [v for v in graph.inputs if (v.name or "").startswith("past_")]
    updates = [node for node in graph if node.op_type == "TensorScatter"]
    whole = {*caches, *(node.outputs[0] for node in updates)}
    mask = next((value for value in graph.inputs if value.name == "attn_mask"), None)
    if mask is not None and caches:
        end = ir.val("num_read", ir.DataType.INT64, [1])
        graph.insert_before(graph[0], ir.node("Shape", [mask], {"start": 3, "end": 4}, outputs=[end]))
        # Torch's exporter takes the size of an axis from any of the inputs that have it.
        for node in [each for each in graph if each.op_type == "Shape" and each.inputs[0] in whole]:
            axes = [node.attributes[name].as_int() for name in ("start", "end") if name in node.attributes]
            if axes == [2, 3]:
                ir.convenience.replace_all_uses_with(node.outputs[0], end)
            elif axes not in ([0, 1], [1, 2], [3, 4]):
                raise ExportError(f"{node.name}: expected one axis of a cache alone, got axes {axes}")
        begin = constant(graph, "first_read", np.array([0], np.int64))
        axis = constant(graph, "axis_read", np.array([2], np.int64))
        for node in updates:
            present = node.outputs[0]
            users = tuple(present.uses())
            part = ir.val(f"{present.name}_read", shape=present.shape, type=present.type)
            read = ir.node("Slice", [present, begin, end, axis], outputs=[part])
            for user, index in users:
                user.replace_input_with(index, part)
            graph.insert_after(node, read)
        RemoveUnusedNodesPass()(model)
    for value in [*graph.inputs, *(value for node in graph for value in node.outputs)]:
        if value.shape is not None and value not in whole:
            sizes = (size if isinstance(size, int) else size.value for size in value.shape)
            value.shape = ir.Shape("R" if size == "S" else size for size in sizes)


def strip_metadata(model: ir.Model) -> None:
    """Remove the exporter's notes on every node: stack traces with local paths, module scopes."""
    notes = [model.metadata_props, model.graph.metadata_props]
    for node in model.graph:
        notes.append(node.metadata_props)
        node.doc_string = None
        notes += [value.metadata_props for value in node.outputs]
    notes += [value.metadata_props for value in (*model.graph.inputs, *model.graph.initializers.values())]
    for note in notes:
        note.clear()
