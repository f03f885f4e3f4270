"""torch.export to an ONNX model in memory, with the names of a contract's tensors."""

import logging
import warnings
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from export.errors import ExportError
from export.graphs.rewrites import (
    fold_weights,
    fuse_standard_operators,
    non_standard_operators,
    share_equal_matrices,
    strip_metadata,
)
from runtime.core.bundle import GraphSpec

OPSET = 24
# Example sizes of the open axes. They differ from each other, because equal ones could be taken for one
# axis, and none of them is 1, which would be fixed in the graph. P is Q + N, and no drafter with an axis T
# has fewer than two frames.
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
    "E": 6,
    "K": 4,
}
# The example size of M0; those of M1, M2, ... (the nodes of each depth, in Hydra) follow.
FIRST_DEPTH = 30


def silence_libraries() -> None:
    """Let this process write no progress bars of Transformers, and no warnings of the exporter.

    They say nothing about the user's model.
    """
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)


def trace(module: nn.Module, contract: GraphSpec) -> ir.Model:
    """The ONNX graph of ``module(inputs by name, caches)``; its weights stay in torch's memory."""
    plain = [tensor.name for tensor in contract.inputs if not tensor.name.startswith("past_")]
    examples, axes = [], []
    for tensor in contract.inputs:
        shape = [_example(size) if isinstance(size, str) else size for size in tensor.shape]
        fill = torch.ones if tensor.dtype == "bool" else torch.zeros
        examples.append(fill(shape, dtype=getattr(torch, tensor.dtype)))
        open_axes = (axis for axis, size in enumerate(tensor.shape) if isinstance(size, str))
        axes.append(dict.fromkeys(open_axes, torch.export.Dim.DYNAMIC))

    def arguments(flat: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return dict(zip(plain, flat, strict=False)), flat[len(plain) :]

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


def trace_standard(module: torch.nn.Module, contract: GraphSpec) -> ir.Model:
    """A module's float32 graph in standard operators, without notes of the machine that traced it."""
    with torch.no_grad():
        model = trace(module, contract)
    fold_weights(model)
    share_equal_matrices(model)
    fuse_standard_operators(model)
    foreign = non_standard_operators(model)
    if foreign:
        raise ExportError(f"only standard ONNX operators are expected, got {', '.join(foreign)}")
    strip_metadata(model)
    return model


def _example(axis: str) -> int:
    return EXAMPLE_AXES[axis] if axis in EXAMPLE_AXES else FIRST_DEPTH + int(axis.removeprefix("M"))
