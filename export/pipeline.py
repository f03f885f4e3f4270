"""From a source to checked ONNX files; every target begins with these steps.

Each graph is traced in float32, rewritten to standard operators and to its precision, and written. The very
file is then run by ONNX Runtime and compared with PyTorch. Where weights are quantised, the torch modules get
the rounded weights first: the comparison is about the graph, and ``export.quality`` about the rounding.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch

from export.checks.graph_runner import onnx_runner
from export.checks.target_model import check_target_model, target_model_reference
from export.graphs.contracts import target_model_contract
from export.graphs.embedding import quantize_embedding
from export.graphs.half_precision import cast_graph
from export.graphs.modules import TargetModelGraph
from export.graphs.quantization import quantize_products
from export.graphs.rewrites import (
    fix_capacity,
    name_axes,
    share_tied_embedding,
)
from export.graphs.trace import trace_standard
from export.heads import Check, prepare_drafter
from export.options import Options
from export.precision import Precision, tensors_in
from export.quality import Quality, QualityMeasurement
from export.rounding import Rounded, round_parameters
from export.source import Source
from export.step.build import step_graphs
from runtime.bundle import DrafterSpec, EnginePlan, GraphSpec

Progress = Callable[[str], None]


@dataclass(frozen=True)
class GraphForm:
    """How a target wants a graph.

    features: the type of hidden states that a graph reads or hands on: the target model's for a draft head
    capacity: positions of the cache if the graph has to fix them
    skip_columns: matrices of so many columns are not quantised
    embedding: the shape of a token embedding that is quantised too
    """

    precision: Precision
    features: str
    capacity: int | None = None
    skip_columns: int | None = None
    embedding: tuple[int, int] | None = None


@dataclass(frozen=True)
class WrittenGraph:
    """An ONNX file and its tensors."""

    path: Path
    contract: GraphSpec
    precision: Precision


@dataclass(frozen=True)
class CheckedGraph:
    """An ONNX file and how far it is from PyTorch; ``check`` compares an engine made of it as well."""

    written: WrittenGraph
    check: Check
    differences: dict[str, float]


@dataclass(frozen=True)
class CheckedGraphs:
    """All graphs of a source by name.

    quality: where the target model's weights are quantised
    engine_plan: where they were compiled
    step_nodes: sizes of the trees that a step on a device can have
    engine_validation: the differences of compiled engines from PyTorch, where they were run
    """

    graphs: dict[str, CheckedGraph]
    drafter: DrafterSpec | None
    quality: Quality | None = None
    engine_plan: EnginePlan | None = None
    engine_validation: dict[str, dict[str, float]] = field(default_factory=dict)
    step_nodes: tuple[int, ...] = ()


def graph_forms(
    source: Source,
    options: Options,
    backbone: Precision,
    drafter: Precision,
    *,
    backbone_capacity: int | None = None,
    drafter_capacity: int | None = None,
) -> dict[str, GraphForm]:
    """The forms of both graphs by name, as the options ask for them."""
    spec, features = source.spec, backbone.activations
    embedding = (spec.vocab_size, spec.hidden_size) if options.quantize_embedding else None
    lm_head = spec.vocab_size if options.keep_lm_head else None
    return {
        "backbone": GraphForm(backbone, features, backbone_capacity, lm_head, embedding),
        "drafter": GraphForm(drafter, features, drafter_capacity, None, embedding),
    }


def step_form(name: str, forms: dict[str, GraphForm]) -> GraphForm:
    """The form of a step's weightless graph: caches are as in the graph that has them, other values exact."""
    owner = forms["drafter" if name in ("prepare", "expand") else "backbone"]
    if name == "expand":
        # It hands on the head's states, which are called features here.
        return GraphForm(Precision("float32"), owner.precision.activations, owner.capacity)
    if name == "commit":
        return GraphForm(Precision(owner.precision.activations), owner.features, owner.capacity)
    return GraphForm(Precision("float32"), "float32", owner.capacity)


def build_graphs(
    source: Source,
    directory: Path,
    options: Options,
    forms: dict[str, GraphForm],
    progress: Progress,
    *,
    step_nodes: tuple[int, ...] = (),
) -> CheckedGraphs:
    """Write ``backbone.onnx`` and, if there is a head, ``drafter.onnx``, and compare both with PyTorch.

    forms: by the graphs' names
    step_nodes: draft nodes of the device steps whose weightless graphs are written too; none by default
    The source's model is released before ONNX Runtime loads the weights again. Raises ExportError if a graph
    has an operator that is not standard or differs from PyTorch by more than its precision explains.
    """
    parameters = [*source.model.parameters(), *(source.drafter.parameters() if source.drafter else ())]
    head = prepare_drafter(source.drafter, options) if source.drafter else None
    measurement, quality = None, None
    if forms["backbone"].precision.weights or forms["backbone"].embedding:
        progress("measuring the target model in float32")
        measurement = QualityMeasurement(source, options.quality_text)
    progress("tracing the target model")
    module = TargetModelGraph(
        source.model, source.layer_ids, source.spec.max_position_embeddings, options.attention
    )
    contract = target_model_contract(source.spec)
    backbone, rounded = write_graph(
        module, contract, directory / "backbone.onnx", forms["backbone"], progress
    )
    module.close()
    round_parameters(source.model, rounded)
    if measurement:
        progress("measuring what quantisation does to the target model")
        quality = measurement.compare(source)
    progress("computing PyTorch's reference")
    expected = target_model_reference(source)
    checks: list[tuple[WrittenGraph, Check]] = [
        (backbone, lambda graph: check_target_model(graph, expected)),
    ]
    spec = None
    if head and source.drafter:
        progress("tracing the draft head")
        spec = head.spec
        path = directory / "drafter.onnx"
        drafter, rounded = write_graph(head.module, head.contract, path, forms["drafter"], progress)
        round_parameters(source.drafter, rounded)
        checks.append((drafter, head.check(expected.prefill_features)))
    if step_nodes:
        progress(f"writing the graphs of steps with {', '.join(map(str, step_nodes))} nodes")
        graphs = step_graphs(source.spec, spec, contract, head.contract if head else None, step_nodes)
        for name, step_graph in graphs.items():
            form = step_form(name, forms)
            path = directory / f"{name}.onnx"
            written = save_graph(step_graph.model, step_graph.contract, path, form, has_weights=False)
            checks.append((written, step_graph.check))
    del module, head, rounded
    source.model, source.drafter = None, None
    # The library of rewriting rules keeps the last graph that it looked at, and with it these tensors.
    for parameter in parameters:
        parameter.data = torch.empty(0)
    gc.collect()
    checked = {}
    for graph, check in checks:
        progress(f"comparing {graph.path.name} with PyTorch")
        differences = check(onnx_runner(graph.path, graph.contract, graph.precision))
        checked[graph.path.stem] = CheckedGraph(graph, check, differences)
    return CheckedGraphs(checked, spec, quality, step_nodes=step_nodes)


def write_graph(
    module: torch.nn.Module, contract: GraphSpec, path: Path, form: GraphForm, progress: Progress
) -> tuple[WrittenGraph, Rounded]:
    """Trace a module with a float32 contract, and write the graph in its form.

    Returns the file, and the weights that were quantised.
    """
    model = trace_standard(module, contract)
    precision, rounded = form.precision, Rounded()
    notes = [f"activations in {precision.activations}"]
    if precision.weights:
        products = quantize_products(
            model, precision.weights, precision.activations, skip_columns=form.skip_columns
        )
        rounded.matrices.update(products.matrices)
        notes.append(f"{len(products.matrices)} matrices in {precision.weights.dtype}")
        if products.num_partial:
            notes.append(f"{products.num_partial} kept: no multiple of {precision.weights.block_size} rows")
    if form.embedding:
        rounded.tables.update(quantize_embedding(model, form.embedding, precision.activations))
        notes.append("embedding in int8")
    share_tied_embedding(model)
    progress(f"writing {path.name} ({', '.join(notes)})")
    return save_graph(model, contract, path, form), rounded


def save_graph(
    model: ir.Model, contract: GraphSpec, path: Path, form: GraphForm, *, has_weights: bool = True
) -> WrittenGraph:
    """Write a float32 graph with the activations and the capacity of its form."""
    precision = form.precision
    name_axes(model, contract)
    contract = tensors_in(contract, precision.activations, features=form.features, capacity=form.capacity)
    if {precision.activations, form.features} != {"float32"}:
        cast_graph(model, precision.activations, contract)
    if form.capacity:
        fix_capacity(model, form.capacity)
    ir.save(model, path, external_data=f"{path.name}.data" if has_weights else None)
    return WrittenGraph(path, contract, precision)
