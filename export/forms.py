"""Precision and shape of an exported graph, and the file that it is written to."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

from export.graphs.trace import fix_capacity, name_axes, slice_caches
from export.options import FLOAT_LM_HEAD, INT8_LM_HEAD, Options
from export.quantisation.half_precision import cast_graph
from export.quantisation.precision import (
    BFLOAT16_SCALES,
    INT8_BLOCKS,
    Precision,
    WeightForm,
    tensors_in,
)
from export.source import Source
from export.verify.runner import Check
from runtime.core.bundle import GraphSpec, TensorSpec


@dataclass(frozen=True)
class GraphForm:
    """Precision and shape in which a target takes a graph.

    features: the type of hidden states that a graph reads or hands on: the target model's for a draft head
    capacity: positions of the cache if the graph has to fix them
    other_weights: the forms of matrices of so many columns, in place of the precision's; None: not quantised
    embedding: whether the token embedding is quantised too
    sliced: whether passes read the first R positions of the caches, as many as their masks have columns, and
        not all S
    """

    precision: Precision
    features: str
    capacity: int | None = None
    other_weights: Mapping[int, WeightForm | None] = field(default_factory=dict)
    embedding: bool = False
    sliced: bool = False


@dataclass(frozen=True)
class WrittenGraph:
    """An ONNX file and its tensors."""

    path: Path
    contract: GraphSpec
    precision: Precision


@dataclass(frozen=True)
class GraphFile:
    """A file, and the check that compares it, or an engine made of it, with PyTorch."""

    written: WrittenGraph
    check: Check


def graph_forms(
    source: Source,
    options: Options,
    backbone: Precision,
    drafter: Precision,
    *,
    backbone_capacity: int | None = None,
    drafter_capacity: int | None = None,
    sliced: Container[str] = (),
) -> dict[str, GraphForm]:
    """The forms of the graphs with weights by name, as the options ask for them.

    drafter_capacity: of the graph that drafts. A graph with streams has the target model's form otherwise:
        it has the target model's matrices, which are rounded alike in both graphs
    sliced: names of the graphs that are sliced, as of ``GraphForm``
    """
    spec, features = source.spec, backbone.activations
    embedding = options.quantize_embedding
    other_weights: dict[int, WeightForm | None] = {}
    if options.lm_head == FLOAT_LM_HEAD:
        other_weights[spec.vocab_size] = None
    elif options.lm_head == INT8_LM_HEAD:
        other_weights[spec.vocab_size] = INT8_BLOCKS.weights
    if drafter.weights is not None and drafter.weights.dtype == BFLOAT16_SCALES.dtype:
        # A head in int4 has the same weights in every target, so that one bundle can check another.
        drafter = replace(drafter, weights=BFLOAT16_SCALES)
    streaming = GraphForm(backbone, features, drafter_capacity, other_weights, embedding)
    drafts = GraphForm(drafter, features, drafter_capacity, embedding=embedding)
    if source.drafter and source.drafter.config.trunk_type.borrows_layers:
        drafts = streaming
    return {
        "backbone": replace(streaming, capacity=backbone_capacity, sliced="backbone" in sliced),
        "drafter": replace(drafts, sliced="drafter" in sliced),
        "streaming": streaming,
    }


def step_form(name: str, forms: dict[str, GraphForm]) -> GraphForm:
    """The form of a step-logic graph: caches are as in the graph that has them, other values exact."""
    owner = forms["drafter" if name in ("prepare", "expand") else "backbone"]
    exact = GraphForm(Precision("float32"), "float32", owner.capacity, sliced=owner.sliced)
    if name == "expand":
        # It hands on the head's states, which are called features here.
        return replace(exact, features=owner.precision.activations)
    if name == "commit":
        return GraphForm(Precision(owner.precision.activations), owner.features, owner.capacity)
    return exact


def sliced(contract: GraphSpec) -> GraphSpec:
    """The contract of a graph after ``slice_caches``."""

    def renamed(tensor: TensorSpec) -> TensorSpec:
        if tensor.name.startswith(("past_", "present_")):
            return tensor
        shape = tuple("R" if axis == "S" else axis for axis in tensor.shape)
        return TensorSpec(tensor.name, shape, tensor.dtype)

    return GraphSpec(tuple(map(renamed, contract.inputs)), tuple(map(renamed, contract.outputs)))


def save_graph(
    model: ir.Model, contract: GraphSpec, path: Path, form: GraphForm, *, has_weights: bool = True
) -> WrittenGraph:
    """Write a float32 graph with the activations and the capacity of its form."""
    precision = form.precision
    name_axes(model, contract)
    if form.sliced:
        slice_caches(model)
        contract = sliced(contract)
    contract = tensors_in(contract, precision.activations, features=form.features, capacity=form.capacity)
    if {precision.activations, form.features} != {"float32"}:
        cast_graph(model, precision.activations, contract)
    if form.capacity:
        fix_capacity(model, form.capacity)
    ir.save(model, path, external_data=f"{path.name}.data" if has_weights else None)
    return WrittenGraph(path, contract, precision)
