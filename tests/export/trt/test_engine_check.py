"""Running compiled engines after a build, on a stand-in for the driver whose memory is the host's."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import onnx
import pytest

from export.errors import ExportError
from export.forms import GraphFile, GraphForm
from export.graphs.contracts import target_model_contract
from export.graphs.modules import TargetModelGraph
from export.options import Options
from export.pipeline import write_graph
from export.quantisation.precision import Precision
from export.source import load_source
from export.trt.compiler import Library
from export.trt.plan import backbone_capacity, backbone_profiles, draft_plan
from export.trt.target import check_engine, why_not_run
from export.verify.target_model import check_target_model, target_model_reference
from runtime.core.bundle import EngineProfile
from tests.device_of_memory import FakeCudart, FakeTensorRT


class Built:
    """A graph in half precision, and the profiles that its engine is compiled for."""

    def __init__(self, graph: GraphFile, profiles: tuple[EngineProfile, ...]):
        self.graph, self.profiles = graph, profiles

    def check(self, cudart: FakeCudart, plan: Path | None = None) -> dict[str, float]:
        trt = FakeTensorRT(cudart, self.graph.written.contract, self.profiles)
        library = Library("tensorrt-rtx", trt, None)
        path = plan or self.graph.written.path
        return check_engine(library, cudart, bytes(str(path).encode()), self.graph, self.profiles)


@pytest.fixture(scope="module")
def built(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Callable[..., AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Built:
    source = load_source(tiny_model_dir, tiny_drafter_dir)
    plan = draft_plan(source.spec, Options(max_batch=4))
    form = GraphForm(Precision("float16"), "float16", backbone_capacity(plan, None), sliced=True)
    module = TargetModelGraph(source.model, source.layer_ids, source.spec.max_position_embeddings, "fused")
    path = tmp_path_factory.mktemp("engine") / "backbone.onnx"
    with copied_graphs(backbone=tiny_bundle_dir):
        written, _ = write_graph(module, target_model_contract(source.spec), path, form, lambda _: None)
    module.close()
    expected = target_model_reference(source)
    graph = GraphFile(written, lambda runner: check_target_model(runner, expected))
    return Built(graph, backbone_profiles(plan, None, written.contract))


def test_an_engine_is_compared_with_pytorch_and_its_memory_freed(built: Built) -> None:
    cudart = FakeCudart()
    differences = built.check(cudart)
    assert set(differences) == {"prefill", "tree", "equal_argmax"}
    assert 0 < differences["tree"] < 0.5
    assert cudart.leftovers() == []


def test_an_engine_that_computes_something_else_is_refused(built: Built, tmp_path: Path) -> None:
    model = onnx.load(built.graph.written.path)
    (weight,) = [w for w in model.graph.initializer if "embed_tokens" in w.name]
    changed = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float16(1.5), weight.name)
    weight.CopyFrom(changed)
    onnx.save(model, tmp_path / "wrong.onnx")
    cudart = FakeCudart()
    with pytest.raises(ExportError, match="prefill logits: the graph differs from PyTorch"):
        built.check(cudart, tmp_path / "wrong.onnx")
    assert cudart.leftovers() == []


def test_faults_of_the_driver_are_one_line(built: Built, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cudaMalloc: out of memory"):
        built.check(FakeCudart(memory=100_000))
    with pytest.raises(ExportError, match="backbone: tensorrt_of_memory 0 cannot load this plan"):
        built.check(FakeCudart(), tmp_path / "missing.onnx")
    narrow = Built(built.graph, ({"B": (1, 1, 1), "N": (1, 8, 8), "M": (1, 8, 8)},))
    with pytest.raises(ExportError, match=r"no optimisation profile takes .*'N': 21"):
        narrow.check(FakeCudart())


def test_where_engines_can_be_run() -> None:
    library = Library("tensorrt-rtx", None, None)
    assert why_not_run(library, ("sm89",), FakeCudart()) is None
    assert why_not_run(library, ("sm89",), None) == "cuda-bindings is not installed"
    reason = why_not_run(library, ("sm80", "sm120"), FakeCudart())
    assert reason == "they were compiled for sm80, sm120, and this machine's GPU is sm89"
    assert why_not_run(Library("tensorrt", None, None), (), FakeCudart()) is None
