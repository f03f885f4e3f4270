"""The weightless graphs of a step compile with NVIDIA's own compiler; that they compute what the runtime does
is tested with ONNX Runtime. Nothing is executed on a GPU here: TensorRT for RTX compiles without one.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters.base import Drafter
from export.graphs.contracts import target_model_contract
from export.heads import prepare_drafter
from export.options import Options
from export.pipeline import graph_forms, save_graph, step_form
from export.precision import Precision
from export.source import Source, load_source
from export.step import build, search_graph
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
def graphs_of(source: Source) -> Iterator[Callable[[Drafter], dict[str, StepGraph]]]:
    """Makes the graphs of a head's steps. What two heads have in common is traced once, to save time."""
    traced: dict[Any, Any] = {}

    def once(trace: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(module: Any, contract: Any) -> Any:
            key = type(module), contract
            if key not in traced:
                traced[key] = trace(module, contract)
            return traced[key]

        return remembered

    def make(head: Drafter) -> dict[str, StepGraph]:
        prepared = prepare_drafter(head, OPTIONS)
        contract = target_model_contract(source.spec)
        return step_graphs(source.spec, prepared.spec, contract, prepared.contract, NODES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "trace_standard", once(build.trace_standard))
        patch.setattr(search_graph, "trace", once(search_graph.trace))
        yield make


def compiled(source: Source, head: Drafter, graphs: dict[str, StepGraph], directory: Path) -> dict[str, int]:
    """Compile the graphs; returns the layers of each."""
    plan = dataclasses.replace(draft_plan(source.spec, OPTIONS), max_nodes=NODES[-1])
    forms = graph_forms(
        source,
        OPTIONS,
        HALF,
        HALF,
        backbone_capacity=backbone_capacity(plan, head.config),
        drafter_capacity=drafter_capacity(plan, head.config, OPTIONS),
    )
    library, layers = load_library("tensorrt-rtx"), {}
    for name, graph in graphs.items():
        path = directory / f"{name}.onnx"
        written = save_graph(graph.model, graph.contract, path, step_form(name, forms), has_weights=False)
        profiles = step_profiles(plan, written.contract)
        assert all(profile["B"] == (1, 8, 8) for profile in profiles)
        engine = compile_engine(library, path, written.contract, profiles, capabilities=("sm89",))
        assert engine.plan
        layers[name] = sum(engine.layers.values())
    return layers


def test_graphs_of_a_step(
    source: Source,
    graphs_of: Callable[[Drafter], dict[str, StepGraph]],
    make_tiny_head: Callable[..., Drafter],
    tmp_path: Path,
) -> None:
    head = make_tiny_head(num_frames=2, transition="mlp")
    layers = compiled(source, head, graphs_of(head), tmp_path)
    assert {"search_0", "search_8", "prepare", "accept", "accept_sampled", "commit"} <= layers.keys()
    # Without a transition only the search is another graph.
    head = make_tiny_head(num_frames=2)
    assert head.config.merges_repeats
    others = {"search_8": graphs_of(head)["search_8"]}
    assert compiled(source, head, others, tmp_path)["search_8"] < layers["search_8"]
