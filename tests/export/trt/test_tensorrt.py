"""Every graph of ours compiles with NVIDIA's own compiler, once its very file agrees with PyTorch.

The file is compared in every precision, and compiled in one or more of them, because compiling takes several
times as long as all the rest.

Nothing is executed on a GPU here: TensorRT for RTX compiles without one.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.base import Drafter
from export.forms import GraphForm, WrittenGraph
from export.graphs.contracts import target_model_contract
from export.graphs.modules import TargetModelGraph
from export.heads import prepare_drafter
from export.options import Options
from export.pipeline import write_graph
from export.quantisation.precision import Precision
from export.quantisation.weights import round_parameters
from export.source import load_source
from export.trt.compiler import compile_engine, load_library
from export.trt.plan import (
    backbone_capacity,
    backbone_profiles,
    draft_plan,
    drafter_capacity,
    drafter_profiles,
    drafter_reads_in_place,
    target_model_reads_in_place,
)
from export.trt.target import FORMS
from export.verify.runner import onnx_runner
from export.verify.target_model import check_target_model, target_model_reference
from runtime.core.bundle import EngineProfile
from tests.conftest import LEVEL_HEADS, PARALLEL_HEADS
from tests.export.conftest import CASES

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)

OPTIONS = Options(max_batch=4)
PRECISIONS = {
    "fp16": Precision("float16"),
    "int4": Precision("float16", FORMS["int4"]),
    "bf16": Precision("bfloat16"),
}
Copied = Callable[..., AbstractContextManager[None]]


def quiet(message: str) -> None:
    """Progress that nobody reads."""


def is_compiled(name: str, alike: Sequence[str], precision: str, precisions: Sequence[str]) -> bool:
    """Each of the graphs that are alike is compiled, and they are compiled in each precision."""
    return alike.index(name) % len(precisions) == precisions.index(precision) % len(alike)


def check_compiles(graph: WrittenGraph, profiles: tuple[EngineProfile, ...]) -> None:
    library = load_library("tensorrt-rtx")
    engine = compile_engine(library, graph.path, graph.contract, profiles, capabilities=("sm89",))
    assert engine.activation_bytes > 0
    assert engine.plan


@pytest.mark.parametrize("precision", ["fp16", "bf16", "int4"])
def test_every_family(precision: str, exported: Any, copied_graphs: Copied, tmp_path: Path) -> None:
    source = load_source(exported.model_dir, exported.drafter_dir)
    plan = draft_plan(source.spec, OPTIONS)
    in_place = target_model_reads_in_place(source.model.config, "float16", exported.case.attention)
    activations = PRECISIONS[precision].activations
    form = GraphForm(PRECISIONS[precision], activations, backbone_capacity(plan, None), sliced=not in_place)
    module = TargetModelGraph(
        source.model, source.layer_ids, source.spec.max_position_embeddings, exported.case.attention
    )
    with copied_graphs(backbone=exported.bundle.path):
        contract = target_model_contract(source.spec)
        graph, rounded = write_graph(module, contract, tmp_path / "backbone.onnx", form, quiet)
    module.close()
    round_parameters(source.model, rounded)
    expected = target_model_reference(source)
    differences = check_target_model(onnx_runner(graph.path, graph.contract, graph.precision), expected)
    assert differences["equal_argmax"] > 0.8
    assert differences["tree"] > 1e-5  # half precision it is
    # What a compiler may refuse in one precision alone is a product, attention or the choice of experts.
    case = exported.case
    alike = [
        other.name
        for other in CASES.values()
        if (other.attention, other.routers) == (case.attention, case.routers)
    ]
    if is_compiled(case.name, alike, precision, list(PRECISIONS)):
        check_compiles(graph, backbone_profiles(plan, None, graph.contract))


def check_head(
    head: Drafter,
    bundle: Path,
    model_dir: Path,
    copied_graphs: Copied,
    directory: Path,
    precision: str,
    *,
    compiled: bool,
) -> None:
    source = load_source(model_dir, None)
    # Rounding changes the head, which other precisions read after this one.
    head = copy.deepcopy(head)
    head.attach_base(source.model.get_input_embeddings().weight, source.model.lm_head.weight)
    plan = draft_plan(source.spec, OPTIONS)
    capacity = drafter_capacity(plan, head.config, OPTIONS)
    prepared = prepare_drafter(head, OPTIONS)
    in_place = drafter_reads_in_place(head.config, "float16", None)
    form = GraphForm(PRECISIONS[precision], "float16", capacity, sliced=not in_place)
    with copied_graphs(drafter=bundle):
        graph, rounded = write_graph(
            prepared.module, prepared.contract, directory / "drafter.onnx", form, quiet
        )
    round_parameters(head, rounded)
    check = prepared.check(np.random.default_rng(0).normal(size=(21, 128)).astype(np.float32))
    differences = check(onnx_runner(graph.path, graph.contract, graph.precision))
    assert differences["equal_argmax"] > 0.7
    if compiled:
        check_compiles(graph, drafter_profiles(plan, head.config, OPTIONS, graph.contract))


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_every_parallel_head(
    precision: str, trained_head: Any, tiny_model_dir: Path, copied_graphs: Copied, tmp_path: Path
) -> None:
    head = load_source(tiny_model_dir, trained_head.directory).drafter
    assert head is not None
    compiled = is_compiled(trained_head.name, list(PARALLEL_HEADS), precision, ["fp16", "int4"])
    check_head(
        head, trained_head.bundle, tiny_model_dir, copied_graphs, tmp_path, precision, compiled=compiled
    )


@pytest.fixture(scope="module", params=list(LEVEL_HEADS))
def autoregressive_head(
    request: pytest.FixtureRequest,
    make_tiny_head: Callable[..., Drafter],
    level_bundle_of: Callable[[str], Path],
) -> tuple[str, Drafter, Path]:
    """A head and its bundle in float32."""
    name = request.param
    return name, make_tiny_head(**LEVEL_HEADS[name]), level_bundle_of(name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_autoregressive_head(
    precision: str,
    autoregressive_head: tuple[str, Drafter, Path],
    tiny_model_dir: Path,
    copied_graphs: Copied,
    tmp_path: Path,
) -> None:
    name, head, bundle = autoregressive_head
    compiled = is_compiled(name, list(LEVEL_HEADS), precision, list(PRECISIONS))
    check_head(head, bundle, tiny_model_dir, copied_graphs, tmp_path, precision, compiled=compiled)
