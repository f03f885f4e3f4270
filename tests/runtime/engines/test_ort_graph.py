"""ONNX Runtime behind a device's addresses; its calls for GPUs, on a stand-in for the session."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from runtime.bundle import GraphSpec, TensorSpec
from runtime.engines.host_device import HostDevice
from runtime.engines.ort_graph import CUDA_PROVIDER, OrtGraph, OrtPlace
from runtime.errors import BundleError

SESSION = onnxruntime.InferenceSession
CONTRACT = GraphSpec(
    (TensorSpec("x", ("B", 2), "float32"), TensorSpec("y", ("B", 2), "float32")),
    (TensorSpec("sum", ("B", 2), "float32"),),
)


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """x + y"""
    shape, kind = ir.Shape(["B", 2]), ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=name, shape=shape, type=kind) for name in "xy"]
    node = ir.Node("", "Add", inputs, num_outputs=1)
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = "sum", shape, kind
    model = ir.Model(ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 24}), ir_version=10)
    ir.save(model, tmp_path / "add.onnx")
    return tmp_path / "add.onnx"


def test_passes_of_several_sizes(graph: Path) -> None:
    device, engine = HostDevice(), OrtGraph(graph, CONTRACT, exact=True, num_threads=1)
    arrays = {name: device.allocate((3, 2), "float32") for name in ("x", "y", "sum")}
    small = engine.bind({name: array.rows(0, 1) for name, array in arrays.items()})
    for number in (1, 2):
        device.upload(np.full((3, 2), number, np.float32), arrays["x"])
        found = np.zeros((3, 2), np.float32)
        small()
        device.download(arrays["sum"], found)
        assert found[0].tolist() == [number, number]
        engine.run(arrays)
        device.download(arrays["sum"], found)
        assert (found == number).all()


def test_a_graph_of_other_tensors(graph: Path) -> None:
    with pytest.raises(BundleError, match="inputs differ"):
        OrtGraph(graph, GraphSpec(CONTRACT.inputs[:1], CONTRACT.outputs), exact=True)


class GpuSession:
    """Checks the arguments with a session on the CPU, and notes what is asked of the GPU."""

    def __init__(self, path: Path, options: Any, providers: list[Any]):
        self.providers = providers
        self.session = SESSION(path, options, providers=["CPUExecutionProvider"])
        self.bound: list[tuple[str, int]] = []
        self.captures: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def io_binding(self) -> Any:
        binding, bound = self.session.io_binding(), self.bound

        class Binding:
            def bind_input(self, name: str, memory: str, index: int, *rest: Any) -> None:
                bound.append((memory, index))
                binding.bind_input(name, "cpu", 0, *rest)

            def bind_output(self, name: str, memory: str, index: int, *rest: Any) -> None:
                bound.append((memory, index))
                binding.bind_output(name, "cpu", 0, *rest)

        Binding.inner = binding  # type: ignore[attr-defined]
        return Binding()

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.captures.append(options.get_run_config_entry("gpu_graph_id"))
        self.session.run_with_iobinding(binding.inner, options)


def test_a_gpu(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every binding is captured under a number of its own, and a single pass not at all."""
    sessions: list[GpuSession] = []

    def session(*arguments: Any, **options: Any) -> GpuSession:
        sessions.append(GpuSession(*arguments, **options))
        return sessions[-1]

    monkeypatch.setattr("runtime.engines.ort_graph.ort.InferenceSession", session)
    device, place = HostDevice(), OrtPlace(CUDA_PROVIDER, "cuda", 1, 4711)
    engine = OrtGraph(graph, CONTRACT, exact=True, place=place)
    arrays = {name: device.allocate((3, 2), "float32") for name in ("x", "y", "sum")}
    first, second = (engine.bind(arrays) for _ in range(2))
    for launch in (first, second, first):
        launch()
    engine.run(arrays)
    (made,) = sessions
    assert made.captures == ["1", "2", "1", "-1"]
    assert set(made.bound) == {("cuda", 1)}
    settings = {"device_id": "1", "user_compute_stream": "4711", "enable_cuda_graph": "1"}
    assert made.providers == [(CUDA_PROVIDER, settings)]
