"""ONNX Runtime behind a device's addresses; its calls for GPUs, on a stand-in for the session."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.core.errors import BundleError, DeviceError
from runtime.device.cuda import CudaDevice
from runtime.device.device import HostDevice
from runtime.device.ort import CUDA_PROVIDER, OrtGraph, preload_cuda_libraries
from tests.device_of_memory import FakeCudart

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
    device, engine = HostDevice(), OrtGraph(graph, CONTRACT, int8_products=False, num_threads=1)
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
        OrtGraph(graph, GraphSpec(CONTRACT.inputs[:1], CONTRACT.outputs), int8_products=False)


class GpuSession:
    """Checks the arguments with a session on the CPU, and notes what is asked of the GPU.

    error: what the next pass raises
    """

    def __init__(self, path: Path, options: Any, **settings: Any):
        inspect.signature(SESSION).bind(path, options, **settings)
        self.settings = settings
        self.session = SESSION(path, options, providers=["CPUExecutionProvider"])
        self.bound: list[tuple[str, int]] = []
        self.passes = 0
        self.error: Exception | None = None

    def get_providers(self) -> list[str]:
        return [self.settings["providers"][0][0], "CPUExecutionProvider"]

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
        inspect.signature(SESSION.run_with_iobinding).bind(self, binding, options)
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        if self.error:
            raise self.error
        self.passes += 1
        self.session.run_with_iobinding(binding.inner, options)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[GpuSession]:
    """The sessions that are made, which believe that they run on a GPU."""
    made: list[GpuSession] = []

    def session(*arguments: Any, **options: Any) -> GpuSession:
        made.append(GpuSession(*arguments, **options))
        return made[-1]

    monkeypatch.setattr("runtime.device.ort.ort.InferenceSession", session)
    return made


def gpu_arrays(device: CudaDevice) -> dict[str, Any]:
    arrays = {name: device.allocate((3, 2), "float32") for name in ("x", "y", "sum")}
    device.synchronize()
    return arrays


def test_a_gpu(graph: Path, sessions: list[GpuSession]) -> None:
    """ONNX Runtime captures nothing by itself, since the device captures whole steps."""
    device = CudaDevice(FakeCudart())
    engine = OrtGraph(graph, CONTRACT, int8_products=False, gpu=device)
    arrays = gpu_arrays(device)
    first, second = (engine.bind(arrays) for _ in range(2))
    for launch in (first, second, first):
        launch()
    engine.run(arrays)
    (made,) = sessions
    assert made.passes == 4
    assert set(made.bound) == {("cuda", 0)}
    settings = {"device_id": "0", "user_compute_stream": str(device.stream)}
    settings |= {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
    assert made.settings == {"providers": [(CUDA_PROVIDER, settings)], "enable_fallback": 0}


def test_a_session_that_fell_back_to_the_cpu_is_refused(
    graph: Path, sessions: list[GpuSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime only logs that a library of its CUDA provider is missing."""
    monkeypatch.setattr(GpuSession, "get_providers", lambda self: ["CPUExecutionProvider"])
    cudart = FakeCudart()
    for version, cause in ((13000, r"pip install .*'.\[gpu\]'"), (12080, r"made for CUDA 12\.8, .* is 580")):
        monkeypatch.setattr(cudart, "cudaDriverGetVersion", lambda found=version: (0, found), raising=False)
        with pytest.raises(DeviceError, match=rf"add.onnx: .* could not start its CUDA provider.*{cause}"):
            OrtGraph(graph, CONTRACT, int8_products=False, gpu=CudaDevice(cudart))


def test_a_failed_pass_makes_the_gpu_unusable(graph: Path, sessions: list[GpuSession]) -> None:
    device = CudaDevice(FakeCudart())
    engine = OrtGraph(graph, CONTRACT, int8_products=False, gpu=device)
    arrays = gpu_arrays(device)
    launch = engine.bind(arrays)
    sessions[0].error = RuntimeError("CUDA failure 700")
    with pytest.raises(DeviceError, match=r"^add.onnx: ONNX Runtime failed in a pass: CUDA failure 700$"):
        launch()
    sessions[0].error = None
    for call in (launch, device.synchronize, lambda: engine.run(arrays)):
        with pytest.raises(DeviceError, match=r"cuda:0 is unusable since add.onnx: ONNX Runtime failed"):
            call()


def test_libraries_are_loaded_once_before_the_first_session(
    graph: Path,
    sessions: list[GpuSession],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not inspect.signature(onnxruntime.preload_dlls).bind().arguments
    loads: list[int] = []

    def preload() -> None:
        loads.append(len(sessions))
        print("Failed to load libcudnn.so.9")

    monkeypatch.setattr("runtime.device.ort.ort.preload_dlls", preload)
    preload_cuda_libraries.cache_clear()
    device = CudaDevice(FakeCudart())
    for _ in range(2):
        OrtGraph(graph, CONTRACT, int8_products=False, gpu=device)
    assert loads == [0]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "Failed to load libcudnn.so.9\n")
    preload_cuda_libraries.cache_clear()
    monkeypatch.delattr("runtime.device.ort.ort.preload_dlls")
    OrtGraph(graph, CONTRACT, int8_products=False, gpu=device)
    preload_cuda_libraries.cache_clear()
