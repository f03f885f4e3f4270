"""The step-logic graphs of a step compile with NVIDIA's own compiler.

That they compute what the host does is tested with ONNX Runtime; the bundles of those tests
(``test_step.py`` and ``test_step_of_levels.py`` in ``tests/runtime/device``) are compiled here. Nothing
is executed on a GPU: TensorRT for RTX compiles without one.
"""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from drafters.build import load_drafter
from drafters.config import DrafterConfig
from export.forms import GraphForm, save_graph, step_form
from export.options import Options
from export.quantisation.precision import Precision
from export.trt.compiler import compile_engine, load_library
from export.trt.plan import backbone_capacity, draft_plan, drafter_capacity, step_profiles
from export.verify.runner import onnx_runner
from runtime.core.bundle import Bundle

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)

HALF = Precision("float16")
# The graphs that depend on the head, and those that are the same for all heads of as many frames.
OF_THE_HEAD = ("search_8", "prepare")
OF_ALL_HEADS = ("search_0", "accept", "accept_sampled", "commit")


def layers_of(bundle: Bundle, config: DrafterConfig, name: str, directory: Path, most: int = 8) -> int:
    """Compile a graph for up to ``most`` sequences; returns how many layers it has."""
    assert bundle.manifest.precision == "fp32"
    options = Options(precision="fp16", max_batch=most)
    plan = draft_plan(bundle.manifest.model, options)
    forms = {
        "backbone": GraphForm(HALF, "float16", backbone_capacity(plan, config), sliced=True),
        "drafter": GraphForm(HALF, "float16", drafter_capacity(plan, config, options), sliced=True),
    }
    graph = save_graph(
        ir.load(bundle.path / f"{name}.onnx"),
        bundle.manifest.graphs[name],
        directory / f"{name}.onnx",
        step_form(name, forms),
        has_weights=False,
    )
    # It can be checked against PyTorch, as every build does before it compiles a graph.
    onnx_runner(graph.path, graph.contract, graph.precision)
    profiles = step_profiles(plan, config, options, graph.contract, name)
    assert [profile["B"][0] for profile in profiles] == [1]
    library = load_library("tensorrt-rtx")
    engine = compile_engine(library, graph.path, graph.contract, profiles, capabilities=("sm89",))
    assert engine.plan
    return sum(engine.layers.values())


# The second has a transition.
@pytest.mark.parametrize(("head", "graphs"), [("ctc", OF_THE_HEAD + OF_ALL_HEADS), ("ctc-mlp", OF_THE_HEAD)])
def test_graphs_of_a_step(
    head: str,
    graphs: tuple[str, ...],
    trained_heads_dir: Path,
    make_tiny_bundle: Callable[..., Path],
    tmp_path: Path,
) -> None:
    bundle = Bundle.load(make_tiny_bundle(trained_heads_dir / head, Options(step_nodes=(4, 8))))
    config = load_drafter(trained_heads_dir / head).config
    layers = {name: layers_of(bundle, config, name, tmp_path) for name in graphs}
    layers_of(bundle, config, "search_8", tmp_path, most=1)
    assert layers["search_8"] > max(
        layers[name] for name in layers if name not in ("search_8", "accept_sampled")
    )


@pytest.mark.parametrize("head", ["hydra++", "eagle"])
def test_graphs_of_levels(head: str, level_bundle_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of autoregressive heads; those of Hydra are among those of Hydra++, but for ``prepare``."""
    directory = level_bundle_of(head)
    bundle, config = Bundle.load(directory), load_drafter(directory.parent / "head").config
    for name in ("prepare", "expand", "search_2", "search_8"):
        assert layers_of(bundle, config, name, tmp_path, most=4)
