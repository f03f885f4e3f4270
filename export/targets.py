"""The registry of engine targets. A target turns a source into engine files and checks them."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from export.checks.target_model import check_target_model, target_model_reference
from export.errors import ExportError
from export.graphs.contracts import target_model_contract
from export.graphs.experts import register_experts
from export.graphs.modules import TargetModelGraph
from export.graphs.operators import register_attention
from export.graphs.rewrites import (
    fold_weights,
    fuse_standard_operators,
    name_axes,
    non_standard_operators,
    share_tied_embedding,
    strip_metadata,
)
from export.graphs.trace import trace
from export.heads import prepare_drafter
from export.options import DRAFTER_BITS, Options
from export.round_weights import round_weights
from export.source import Source
from runtime.bundle import DrafterSpec, GraphSpec

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """The engines that a target wrote into the directory it was given."""

    graphs: dict[str, GraphSpec]
    drafter: DrafterSpec | None
    validation: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Target:
    """A kind of engine, and the precisions of weights that it can be built in."""

    name: str
    precisions: tuple[str, ...]
    build: Callable[[Source, Path, Options, Progress], Built]


def build_onnxruntime(source: Source, directory: Path, options: Options, progress: Progress) -> Built:
    """Trace, rewrite and write both graphs, then compare them with PyTorch.

    The source's model is released before ONNX Runtime loads the weights again.
    """
    graphs = {"backbone": target_model_contract(source.spec)}
    progress("computing PyTorch's reference")
    expected = target_model_reference(source)
    head = None
    if source.drafter:
        head = prepare_drafter(source.drafter, expected.prefill_features, options)
        graphs["drafter"] = head.contract
        progress("tracing the draft head")
        _write(head.module, head.contract, directory / "drafter.onnx", progress)
    progress("tracing the target model")
    source.model.set_attn_implementation(register_attention(options.attention))
    source.model.set_experts_implementation(register_experts())
    target_model = TargetModelGraph(source.model, source.layer_ids, source.spec.max_position_embeddings)
    _write(target_model, graphs["backbone"], directory / "backbone.onnx", progress)
    spec, check = (head.spec, head.check) if head else (None, None)
    del target_model, head
    source.model, source.drafter = None, None
    gc.collect()

    progress("comparing the target model with PyTorch")
    path = directory / "backbone.onnx"
    validation = {"backbone": check_target_model(path, graphs["backbone"], expected)}
    if check:
        progress("comparing the draft head with PyTorch")
        path = directory / "drafter.onnx"
        validation["drafter"] = check(path)
        if options.drafter_precision in DRAFTER_BITS:
            count = round_weights(path, options.drafter_precision)
            progress(f"rounded {count} matrices of the draft head to {options.drafter_precision}")
    return Built(graphs, spec, validation)


def _write(module: torch.nn.Module, contract: GraphSpec, path: Path, progress: Progress) -> None:
    with torch.no_grad():
        model = trace(module, contract)
    fold_weights(model)
    fused = fuse_standard_operators(model)
    share_tied_embedding(model)
    foreign = non_standard_operators(model)
    if foreign:
        raise ExportError(f"{path.name}: only standard ONNX operators are expected, got {', '.join(foreign)}")
    name_axes(model, contract)
    strip_metadata(model)
    progress(f"writing {path.name} ({', '.join(f'{n} {name}' for name, n in fused.items())})")
    ir.save(model, path, external_data=f"{path.name}.data")


TARGETS = {target.name: target for target in (Target("onnxruntime", ("fp32",), build_onnxruntime),)}


def resolve(name: str, precision: str) -> Target:
    """The target called ``name``; for ``auto`` the first with this precision. Raises ExportError."""
    if name not in ("auto", *TARGETS):
        raise ExportError(f"--target: must be auto or one of {', '.join(TARGETS)}, got {name!r}")
    candidates = list(TARGETS.values()) if name == "auto" else [TARGETS[name]]
    for target in candidates:
        if precision in target.precisions:
            return target
    supported = "; ".join(f"{target.name} supports {', '.join(target.precisions)}" for target in candidates)
    raise ExportError(f"--precision: {supported}, got {precision!r}")
