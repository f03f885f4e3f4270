"""From a source to checked ONNX files; every target begins with these steps.

Each graph is traced in float32, rewritten to standard operators and to its precision, and written. The very
file is then run by ONNX Runtime and compared with PyTorch. Where weights are quantised, the torch modules get
the rounded weights first: the comparison is about the graph, and ``export.quality`` about the rounding.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from export.checks.graph_runner import GraphRunner
from export.checks.target_model import check_target_model, target_model_reference
from export.errors import ExportError
from export.graphs.contracts import target_model_contract
from export.graphs.embedding import quantize_embedding
from export.graphs.half_precision import to_half
from export.graphs.modules import TargetModelGraph
from export.graphs.operators import register_attention
from export.graphs.quantization import quantize_products
from export.graphs.rewrites import (
    fix_capacity,
    fold_weights,
    fuse_standard_operators,
    name_axes,
    non_standard_operators,
    share_tied_embedding,
    strip_metadata,
)
from export.graphs.trace import trace
from export.heads import Check, prepare_drafter
from export.options import Options
from export.precision import Precision, tensors_in
from export.quality import Quality, QualityMeasurement
from export.rounding import Rounded, round_parameters
from export.source import Source
from runtime.bundle import DrafterSpec, GraphSpec

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """What a target asks of the graphs.

    backbone, drafter: their precisions
    backbone_capacity, drafter_capacity: positions of the caches where the graphs fix them
    """

    backbone: Precision
    drafter: Precision
    backbone_capacity: int | None = None
    drafter_capacity: int | None = None


@dataclass(frozen=True)
class CheckedGraph:
    """An ONNX file, its tensors, and how far it is from PyTorch."""

    path: Path
    contract: GraphSpec
    differences: dict[str, float]


@dataclass(frozen=True)
class CheckedGraphs:
    """All graphs of a source by name; ``quality`` where the target model's weights are quantised."""

    graphs: dict[str, CheckedGraph]
    drafter: DrafterSpec | None
    quality: Quality | None


@dataclass(frozen=True)
class _Written:
    path: Path
    contract: GraphSpec
    precision: Precision
    rounded: Rounded


def build_graphs(
    source: Source, directory: Path, options: Options, recipe: Recipe, progress: Progress
) -> CheckedGraphs:
    """Write ``backbone.onnx`` and, if there is a head, ``drafter.onnx``, and compare both with PyTorch.

    The source's model is released before ONNX Runtime loads the weights again. Raises ExportError if a graph
    has an operator that is not standard or differs from PyTorch by more than its precision explains.
    """
    measurement = None
    if recipe.backbone.weights or options.quantize_embedding:
        progress("measuring the target model in float32")
        measurement = QualityMeasurement(source, options.quality_text)
    spec = source.spec
    embedding = (spec.vocab_size, spec.hidden_size) if options.quantize_embedding else None
    progress("tracing the target model")
    source.model.set_attn_implementation(register_attention(options.attention))
    module = TargetModelGraph(source.model, source.layer_ids)
    written = {
        "backbone": _write(
            module,
            target_model_contract(spec),
            directory / "backbone.onnx",
            recipe.backbone,
            recipe.backbone.activations,
            recipe.backbone_capacity,
            spec.vocab_size if options.keep_lm_head else None,
            embedding,
            progress,
        )
    }
    module.close()
    round_parameters(source.model, written["backbone"].rounded)
    quality = None
    if measurement:
        progress("measuring what quantisation does to the target model")
        quality = measurement.compare(source)
    progress("computing PyTorch's reference")
    expected = target_model_reference(source)
    checks: dict[str, Check] = {"backbone": lambda graph: check_target_model(graph, expected)}
    drafter = None
    if source.drafter:
        head = prepare_drafter(source.drafter, options)
        drafter = head.spec
        progress("tracing the draft head")
        written["drafter"] = _write(
            head.module,
            head.contract,
            directory / "drafter.onnx",
            recipe.drafter,
            recipe.backbone.activations,
            recipe.drafter_capacity,
            None,
            embedding,
            progress,
        )
        round_parameters(source.drafter, written["drafter"].rounded)
        checks["drafter"] = head.check(expected.prefill_features)
        del head
    del module
    source.model, source.drafter = None, None
    gc.collect()
    graphs = {}
    for name, graph in written.items():
        progress(f"comparing {graph.path.name} with PyTorch")
        runner = GraphRunner(graph.path, graph.contract, graph.precision)
        graphs[name] = CheckedGraph(graph.path, graph.contract, checks[name](runner))
    return CheckedGraphs(graphs, drafter, quality)


def _write(
    module: torch.nn.Module,
    contract: GraphSpec,
    path: Path,
    precision: Precision,
    features: str,
    capacity: int | None,
    skip_columns: int | None,
    embedding: tuple[int, int] | None,
    progress: Progress,
) -> _Written:
    """embedding: the shape of the table to quantise, if any"""
    model = trace_standard(module, contract)
    notes = []
    rounded = Rounded()
    if precision.weights:
        products = quantize_products(
            model, precision.weights, precision.activations, skip_columns=skip_columns
        )
        rounded = Rounded(products.matrices)
        notes.append(f"{len(products.matrices)} matrices in {precision.weights.dtype}")
        if products.num_partial:
            notes.append(f"{products.num_partial} kept: no multiple of {precision.weights.block_size} rows")
    if embedding:
        rounded.tables.update(quantize_embedding(model, embedding, precision.activations))
        notes.append("embedding in int8")
    share_tied_embedding(model)
    name_axes(model, contract)
    contract = tensors_in(contract, precision.activations, features=features, capacity=capacity)
    if precision.activations != "float32":
        to_half(model, precision.activations, contract)
        notes.append(f"activations in {precision.activations}")
    if capacity:
        fix_capacity(model, capacity)
    progress(f"writing {path.name} ({', '.join(notes) or 'float32'})")
    ir.save(model, path, external_data=f"{path.name}.data")
    return _Written(path, contract, precision, rounded)


def trace_standard(module: torch.nn.Module, contract: GraphSpec) -> ir.Model:
    """A module's float32 graph in standard operators, without notes of the machine that traced it."""
    with torch.no_grad():
        model = trace(module, contract)
    fold_weights(model)
    fuse_standard_operators(model)
    foreign = non_standard_operators(model)
    if foreign:
        raise ExportError(f"only standard ONNX operators are expected, got {', '.join(foreign)}")
    strip_metadata(model)
    return model
