"""The registry of engine targets. A target turns a source into engine files and says how it checked them."""

import gc
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from export.contracts import target_model_contract
from export.errors import ExportError
from export.graph_ops import register_attention
from export.heads import prepare_drafter
from export.modules import TargetModelGraph
from export.options import DRAFTER_BITS, Options
from export.reference import backbone_reference
from export.rewrites import (
    fold_weights,
    fuse_standard_operators,
    non_standard_operators,
    share_tied_embedding,
    strip_metadata,
)
from export.round_weights import round_weights
from export.source import Source
from export.trace import trace
from export.validate import check_backbone
from runtime.bundle import DrafterSpec, GraphSpec


@dataclass(frozen=True)
class Built:
    """The engines a target wrote into the directory it was given."""

    graphs: dict[str, GraphSpec]
    drafter: DrafterSpec | None
    validation: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Target:
    """``missing`` says why the target cannot be used here, or None; best targets have the highest rank."""

    name: str
    rank: int
    precisions: tuple[str, ...]
    missing: Callable[[], str | None]
    build: Callable[[Source, Path, Options, Callable[[str], None]], Built]


def build_onnxruntime(
    source: Source, directory: Path, options: Options, progress: Callable[[str], None]
) -> Built:
    """Trace, rewrite and write both graphs, then compare them with PyTorch.

    The source's model is released before ONNX Runtime loads the weights again.
    """
    graphs = {"backbone": target_model_contract(source.spec)}
    progress("computing PyTorch's reference")
    expected = backbone_reference(source)
    head = None
    if source.drafter:
        head = prepare_drafter(source.drafter, expected.prefill_features, options)
        graphs["drafter"] = head.contract
        progress("tracing the draft head")
        _write(head.module, head.contract, directory / "drafter.onnx", progress)
    progress("tracing the backbone")
    source.model.set_attn_implementation(register_attention(options.attention))
    backbone = TargetModelGraph(source.model, source.layer_ids)
    _write(backbone, graphs["backbone"], directory / "backbone.onnx", progress)
    spec, check = (head.spec, head.check) if head else (None, None)
    del backbone, head
    source.model, source.drafter = None, None
    gc.collect()

    validation = {}
    progress("comparing the backbone with PyTorch")
    validation["backbone"] = check_backbone(directory / "backbone.onnx", graphs["backbone"], expected)
    if check:
        progress("comparing the draft head with PyTorch")
        path = directory / "drafter.onnx"
        validation["drafter"] = check(path)
        if options.drafter_precision in DRAFTER_BITS:
            count = round_weights(path, options.drafter_precision)
            progress(f"rounded {count} matrices of the draft head to {options.drafter_precision}")
    return Built(graphs, spec, validation)


def _write(module: torch.nn.Module, contract: GraphSpec, path: Path, progress: Callable[[str], None]) -> None:
    with torch.no_grad():
        model = trace(module, contract)
    fold_weights(model)
    fused = fuse_standard_operators(model)
    share_tied_embedding(model)
    foreign = non_standard_operators(model)
    if foreign:
        raise ExportError(f"{path.name}: only standard ONNX operators are expected, got {', '.join(foreign)}")
    strip_metadata(model)
    progress(f"writing {path.name} ({', '.join(f'{n} {name}' for name, n in fused.items())})")
    ir.save(model, path, external_data=f"{path.name}.data")


def _onnxruntime_missing() -> str | None:
    return None if importlib.util.find_spec("onnxruntime") else "onnxruntime is not installed"


TARGETS = {
    target.name: target
    for target in (Target("onnxruntime", 0, ("fp32",), _onnxruntime_missing, build_onnxruntime),)
}


def resolve(name: str, precision: str) -> Target:
    """The target called ``name``, or for ``auto`` the best this machine can run. Raises ExportError."""
    if name == "auto":
        usable = [t for t in TARGETS.values() if t.missing() is None and precision in t.precisions]
        if not usable:
            known = "; ".join(f"{t.name}: {', '.join(t.precisions)}" for t in TARGETS.values())
            raise ExportError(f"--precision: no target here supports it, expected {known}; got {precision!r}")
        return max(usable, key=lambda target: target.rank)
    if name not in TARGETS:
        raise ExportError(f"--target: must be auto or one of {', '.join(TARGETS)}, got {name!r}")
    target = TARGETS[name]
    reason = target.missing()
    if reason:
        raise ExportError(f"--target {name}: cannot be used here: {reason}")
    if precision not in target.precisions:
        raise ExportError(f"--precision: {name} supports {', '.join(target.precisions)}, got {precision!r}")
    return target
