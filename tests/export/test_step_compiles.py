"""The weightless graphs of a step compile with NVIDIA's own compiler; that they compute what the runtime does
is tested with ONNX Runtime. Nothing is executed on a GPU here: TensorRT for RTX compiles without one.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafters.base import Drafter
from export.graphs.contracts import target_model_contract
from export.heads import prepare_drafter
from export.options import Options
from export.pipeline import GraphForm, graph_forms, save_graph, step_form
from export.precision import Precision
from export.source import Source, load_source
from export.step import build
from export.step.build import StepGraph, step_graphs
from export.trt.compiler import compile_engine
from export.trt.library import load_library
from export.trt.plan import backbone_capacity, draft_plan, drafter_capacity, step_profiles

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)

OPTIONS = Options(precision="fp16", max_batch=8)
HALF = Precision("float16")
NODES = (0, 8)


@pytest.fixture(scope="module")
def source(tiny_model_dir: Path) -> Source:
    return load_source(tiny_model_dir, None)


@pytest.fixture(scope="module")
def all_graphs(source: Source, make_tiny_head: Callable[..., Drafter]) -> dict[str, StepGraph]:
    """Of a head with a transition."""
    return graphs_of(source, make_tiny_head(num_frames=2, transition="mlp"))


def graphs_of(source: Source, head: Drafter) -> dict[str, StepGraph]:
    prepared = prepare_drafter(head, OPTIONS)
    return step_graphs(
        source.spec, prepared.spec, target_model_contract(source.spec), prepared.contract, NODES
    )


def check_compiles(source: Source, head: Drafter, graph: StepGraph, name: str, directory: Path) -> None:
    plan = draft_plan(source.spec, OPTIONS)
    forms: dict[str, GraphForm] = graph_forms(
        source,
        OPTIONS,
        HALF,
        HALF,
        backbone_capacity=backbone_capacity(plan, head.config),
        drafter_capacity=drafter_capacity(plan, head.config, OPTIONS),
    )
    path = directory / f"{name}.onnx"
    written = save_graph(graph.model, graph.contract, path, step_form(name, forms), has_weights=False)
    profiles = step_profiles(dataclasses.replace(plan, max_nodes=NODES[-1]), written.contract)
    assert all(profile["B"] == (1, 8, 8) for profile in profiles)
    library = load_library("tensorrt-rtx")
    engine = compile_engine(library, path, written.contract, profiles, capabilities=("sm89",))
    assert engine.plan
    assert sum(engine.layers.values()) > 10


@pytest.mark.parametrize("name", ["search_0", "search_8", "prepare", "accept", "commit"])
def test_with_a_transition(
    name: str,
    source: Source,
    all_graphs: dict[str, StepGraph],
    make_tiny_head: Callable[..., Drafter],
    tmp_path: Path,
) -> None:
    head = make_tiny_head(num_frames=2, transition="mlp")
    check_compiles(source, head, all_graphs[name], name, tmp_path)


def test_without_a_transition(
    source: Source,
    all_graphs: dict[str, StepGraph],
    make_tiny_head: Callable[..., Drafter],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the search differs between heads of equal frames; the other graphs are not traced once more."""
    contracts = {graph.contract: graph for name, graph in all_graphs.items() if name != "search_8"}

    def known(module: Any, contract: Any) -> StepGraph:
        return contracts[contract]

    monkeypatch.setattr(build, "_traced", known)
    monkeypatch.setattr(build, "trace_standard", lambda module, contract: contracts[contract].model)
    head = make_tiny_head(num_frames=2)
    assert head.config.merges_repeats
    graphs = graphs_of(source, head)
    check_compiles(source, head, graphs["search_8"], "search_8", tmp_path)
