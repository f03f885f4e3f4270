"""From a source to checked ONNX files; every target begins with these steps.

Each graph is traced in float32, rewritten to standard operators and to its precision, and written. The very
file is then run by ONNX Runtime and compared with PyTorch. Where weights are quantised, the torch modules get
the rounded weights first. So the comparison measures the graph; ``export.quantisation.quality`` measures the
rounding.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.head_types import HEAD_FAMILIES
from export.errors import ExportError
from export.forms import GraphFile, GraphForm, WrittenGraph, save_graph
from export.graphs.compiled import write_compiled_form
from export.graphs.contracts import target_model_contract
from export.graphs.merge import join_heads, merge_products
from export.graphs.modules import TargetModelGraph
from export.graphs.trace import share_tied_embedding, trace_standard
from export.heads import PreparedDrafter, prepare_drafter
from export.options import FUSED, INVARIANT, Options
from export.quantisation.choose_smoothing import SmoothedProducts, smooth_products
from export.quantisation.gptq import round_products
from export.quantisation.int8_activations import write_integer_graph
from export.quantisation.precision import BLOCK_SIZES, INT8_ACTIVATIONS, INT8_ALONE, Precision
from export.quantisation.quality import QualityMeasurement
from export.quantisation.stored import StoredWeights
from export.quantisation.weights import (
    CODES,
    QuantizedMatrix,
    Rounded,
    quantize_embedding,
    quantize_products,
    round_parameters,
)
from export.source import Source
from export.step.build import step_files
from export.verify.runner import onnx_runner
from export.verify.target_model import check_target_model, target_model_reference
from runtime.core.bundle import STREAMING, DrafterSpec, EnginePlan, GraphSpec
from runtime.engines.operators import operator_library
from runtime.engines.ort import COMPILED_SUFFIX, INT8_SUFFIX, UINT8_SUFFIX, adds_in_32_bits

# Reports a message about the progress of a build.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class CheckedGraphs:
    """All graphs of a source by name.

    differences: from PyTorch, of the graphs, of their second forms, and of compiled engines that were run
    quality: where the target model's weights are quantised
    step_nodes: sizes of the trees that a step on a device can have
    engine_plan: where they were compiled
    """

    graphs: dict[str, GraphFile]
    differences: dict[str, dict[str, float]]
    drafter: DrafterSpec | None
    quality: dict[str, str | int | float] | None
    step_nodes: tuple[int, ...]
    engine_plan: EnginePlan | None = None


def build_graphs(
    source: Source,
    directory: Path,
    options: Options,
    forms: dict[str, GraphForm],
    progress: Progress,
    *,
    step_nodes: tuple[int, ...] = (),
    on_step_graph: Callable[[WrittenGraph], None] = lambda graph: None,
    merge: bool = False,
) -> CheckedGraphs:
    """Write ``backbone.onnx`` and, if there is a head, the graph that drafts, and compare both with PyTorch.

    The graph that drafts is ``drafter.onnx``, or ``streaming.onnx`` for streams in the pass that verifies.

    forms: by the graphs' names
    step_nodes: draft nodes of the device steps whose step-logic graphs are written too; none by default
    on_step_graph: called with each of these as soon as its file is written, before it has been compared
    merge: as of ``write_graph``
    The source's model is released before ONNX Runtime loads the weights again. Raises ExportError if a graph
    has an operator that is not standard or differs from PyTorch by more than its precision explains.
    """
    if source.has_codes and options.calibration_text is not None:
        raise ExportError("--calibration-text: is for float weights, and this model has codes")
    head = prepare_drafter(source.drafter, options, source.spec) if source.drafter else None
    smoothed = None
    precision = forms["backbone"].precision
    if precision.is_smoothed and precision.weights:
        progress("measuring the target model's activations")
        smoothed = smooth_products(source, options.calibration_text, precision.weights)
    rounded_before: dict[str, QuantizedMatrix] = {}
    if precision.weights and precision.weights.dtype == "int4" and not source.has_codes:
        progress("rounding the target model's weights")
        rounded_before = round_products(
            source,
            options.calibration_text,
            precision.weights,
            precision.activations,
            smoothed.smoothings if smoothed else {},
            forms["backbone"].other_weights,
        )
    parameters = [*source.model.parameters(), *(source.drafter.parameters() if source.drafter else ())]
    contract = target_model_contract(source.spec)
    stored = StoredWeights(source.stored) if source.stored else None
    on_device = head.on_device if head else None
    arguments = (directory, forms, source.spec, contract, on_device, step_nodes)
    if step_nodes:
        progress(f"writing the graphs of steps with {', '.join(map(str, step_nodes))} nodes")
    with step_files(arguments, on_step_graph, parallel=options.parallel) as step_graphs:
        measurement, quality = None, None
        if forms["backbone"].precision.weights or forms["backbone"].embedding:
            progress("measuring the target model in float32")
            measurement = QualityMeasurement(source, options.quality_text)
        progress("tracing the target model")
        module = TargetModelGraph(
            source.model, source.layer_ids, source.spec.max_position_embeddings, options.attention or FUSED
        )
        write = partial(
            write_graph,
            progress=progress,
            embedding=source.model.get_input_embeddings().weight.detach().numpy(),
            stored=stored,
            smoothed=smoothed,
            merge=merge,
        )
        backbone, rounded = write(
            module, contract, directory / "backbone.onnx", forms["backbone"], rounded_before=rounded_before
        )
        module.close()
        if stored:
            progress(stored.report(forms["backbone"].precision.weights))
        modules: list[torch.nn.Module] = [source.model]
        written: WrittenGraph | None = None
        if head and source.drafter:
            family = HEAD_FAMILIES[head.spec.family]
            progress("tracing the draft head" if on_device else "tracing the target model with its streams")
            path = directory / f"{family.graph}.onnx"
            # Streams run through the target model's layers, which are rounded alike in their graph.
            same = rounded_before if source.drafter.config.trunk_type.borrows_layers else None
            written, of_head = write(head.module, head.contract, path, forms[path.stem], rounded_before=same)
            if head.spec.has_streams:
                modules.append(head.module)
                rounded.matrices.update(of_head.matrices)
                rounded.tables.update(of_head.tables)
            else:
                round_parameters(source.drafter, of_head)
        round_parameters(torch.nn.ModuleList(modules), rounded)
        progress("computing PyTorch's reference")
        files = [*_with_checks(source, backbone, head, written), *step_graphs()]
        second_forms: list[GraphFile] = []
        rounding = smoothed if precision.integer_products else None
        with rounding.rounding_activations(rounded.matrices) if rounding else nullcontext():
            if measurement:
                progress("measuring what quantisation does to the target model")
                quality = measurement.compare(source)
            if precision.integer_products:
                files_now = _with_checks(source, backbone, head, written)
                second_forms = [file for file in files_now if file.written.precision.integer_products]
    spec = head.spec if head else None
    del module, modules, head, rounded, rounded_before, smoothed, write
    source.model, source.drafter = None, None
    # The library of rewriting rules keeps the last graph that it looked at, and with it these tensors.
    for parameter in parameters:
        parameter.data = torch.empty(0)
    gc.collect()
    checked = {file.written.path.stem: file for file in files}
    differences = _compare(checked, second_forms, options, progress)
    return CheckedGraphs(checked, differences, spec, quality, step_nodes)


def _compare(
    files: Mapping[str, GraphFile], second_forms: Sequence[GraphFile], options: Options, progress: Progress
) -> dict[str, dict[str, float]]:
    """Write further forms of the files; returns the differences of all from PyTorch, by their names.

    Forms that this machine does not run are not compared.

    second_forms: graphs with the checks of rounded activations
    """
    differences: dict[str, dict[str, float]] = {}

    def compare(file: GraphFile, path: Path, precision: Precision, library: Path | None = None) -> None:
        progress(f"comparing {path.name} with PyTorch")
        differences[path.stem] = file.check(onnx_runner(path, file.written.contract, precision, library))

    for file in files.values():
        compare(file, file.written.path, file.written.precision)
    for file in second_forms:
        for suffix in (INT8_SUFFIX, UINT8_SUFFIX):
            path = file.written.path.with_suffix(suffix)
            write_integer_graph(file.written.path, path, unsigned=suffix == UINT8_SUFFIX)
            # Signed weights may overflow here, and are not for this processor then.
            if suffix == UINT8_SUFFIX or adds_in_32_bits():
                compare(file, path, INT8_ACTIVATIONS)
    # Streams have a graph of their own, whose texts have to be those of plain decoding in this one.
    if options.attention != INVARIANT or STREAMING in files:
        return differences
    library = operator_library()
    rounded = {file.written.path.stem: file for file in second_forms}
    for name in [name for name in ("backbone", "drafter") if name in files]:
        written, is_drafter = files[name].written, name == "drafter"
        is_quantized = written.precision.weights is not None
        keeps_products = is_quantized and options.float_products and not is_drafter
        path = written.path.with_suffix(COMPILED_SUFFIX)
        has_form = write_compiled_form(
            written.path, path, is_drafter=is_drafter, joins_products=not keeps_products
        )
        if has_form and library is not None:
            precision = INT8_ALONE if is_quantized and not keeps_products else written.precision
            if name in rounded:
                precision = INT8_ACTIVATIONS
            compare(rounded.get(name, files[name]), path, precision, library)
    return differences


def _with_checks(
    source: Source, backbone: WrittenGraph, head: PreparedDrafter | None, drafting: WrittenGraph | None
) -> list[GraphFile]:
    """The files with weights, to be compared with what PyTorch computes now."""
    expected = target_model_reference(source)
    files = [GraphFile(backbone, lambda graph: check_target_model(graph, expected))]
    if head and drafting:
        files.append(GraphFile(drafting, head.check(expected.prefill_features)))
    return files


def write_graph(
    module: torch.nn.Module,
    contract: GraphSpec,
    path: Path,
    form: GraphForm,
    progress: Progress,
    stored: StoredWeights | None = None,
    *,
    embedding: NDArray[np.float32] | None = None,
    smoothed: SmoothedProducts | None = None,
    rounded_before: Mapping[str, QuantizedMatrix] | None = None,
    merge: bool = False,
) -> tuple[WrittenGraph, Rounded]:
    """Trace a module with a float32 contract, and write the graph in its form.

    stored: weights of a quantised checkpoint, which are kept where the form can hold them
    embedding: the target model's [V, H], for a form that quantises it: it is found by its content
    smoothed: how products are smoothed, in graphs whose precision says so
    rounded_before: matrices that are not rounded here, by the digests of the originals
    merge: whether products with the same rows become one, which compilers of engines do by themselves
    Returns the file, and the weights that were quantised.
    """
    model = trace_standard(module, contract)
    precision, rounded = form.precision, Rounded()
    smoothed = smoothed if precision.is_smoothed else None
    notes = [f"activations in {precision.activations}"]
    if precision.weights:
        products = quantize_products(
            model,
            precision.weights,
            precision.activations,
            other_forms=form.other_weights,
            find=stored.find if stored else None,
            smoothings=smoothed.smoothings if smoothed else None,
            rounded=rounded_before,
        )
        rounded.matrices.update(products.matrices)
        for name, dtype in CODES.items():
            count = sum(matrix.codes.dtype == dtype for matrix in products.matrices.values())
            if count:
                notes.append(f"{count} matrices in {name}")
        num_rotated = sum(matrix.smoothing.is_rotated for matrix in products.matrices.values())
        if num_rotated:
            notes.append(f"{num_rotated} of them rotated")
        if products.num_kept:
            notes.append(f"{products.num_kept} of them as the checkpoint has them")
        if products.num_partial:
            notes.append(f"{products.num_partial} kept: no multiple of {BLOCK_SIZES[-1]} rows")
    if form.embedding:
        assert embedding is not None
        rounded.tables.update(quantize_embedding(model, embedding, precision.activations))
        notes.append("embedding in int8")
    share_tied_embedding(model)
    if merge:
        merge_products(model)
        join_heads(model)
    progress(f"writing {path.name} ({', '.join(notes)})")
    return save_graph(model, contract, path, form), rounded
