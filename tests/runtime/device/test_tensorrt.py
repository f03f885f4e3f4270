"""Compiled engines on a device, on a stand-in for the driver and TensorRT that runs ONNX files."""

import importlib
import inspect
import math
import re
import shutil
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from runtime.core.bundle import EngineProfile, GraphSpec, TensorSpec
from runtime.core.errors import DeviceError
from runtime.device.cuda import CudaDevice
from runtime.device.device import DeviceArray, DeviceEngine, can_be_captured
from runtime.device.kernel_file import KernelFile, kernel_file
from runtime.device.program import Program
from runtime.device.tensorrt import ContextFactory, TensorRTEngine
from tests.device_of_memory import (
    FakeContext,
    FakeCudart,
    FakeEngine,
    FakeRuntimeCache,
    FakeRuntimeConfig,
    FakeTensorRT,
    Fault,
)

CAPACITY = 8
CACHE = ("B", 1, CAPACITY, 2)
CONTRACT = GraphSpec(
    inputs=(
        TensorSpec("rows", ("B", 1, "N", 2), "float16"),
        TensorSpec("write_index", ("B",), "int64"),
        TensorSpec("past_key_0", CACHE, "float16"),
    ),
    outputs=(
        TensorSpec("doubled", ("B", 1, "N", 2), "float16"),
        TensorSpec("present_key_0", CACHE, "float16"),
    ),
)
PROFILES: tuple[EngineProfile, ...] = ({"B": (1, 2, 2), "N": (1, 1, 1)}, {"B": (1, 1, 2), "N": (2, 4, 4)})


def save_graph(path: Path, contract: GraphSpec, nodes: list[onnx.NodeProto]) -> Path:
    def infos(tensors: tuple[TensorSpec, ...]) -> list[onnx.ValueInfoProto]:
        return [
            onnx.helper.make_tensor_value_info(
                t.name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(t.dtype)), t.shape
            )
            for t in tensors
        ]

    graph = onnx.helper.make_graph(nodes, "graph", infos(contract.inputs), infos(contract.outputs))
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)], ir_version=11), path
    )
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Writes rows into a cache and doubles them."""
    nodes = [
        onnx.helper.make_node(
            "TensorScatter", ["past_key_0", "rows", "write_index"], ["present_key_0"], axis=-2
        ),
        onnx.helper.make_node("Add", ["rows", "rows"], ["doubled"]),
    ]
    return str(save_graph(tmp_path_factory.mktemp("plan") / "cache.onnx", CONTRACT, nodes)).encode()


class Setup:
    """An engine on a device, and the memory of its largest pass."""

    def __init__(self, plan: bytes, **options: Any):
        self.cudart = FakeCudart()
        self.device = CudaDevice(self.cudart)
        self.trt = FakeTensorRT(self.cudart, options.pop("contract", CONTRACT), PROFILES, **options)
        self.engine = TensorRTEngine(self.trt, None, self.device, plan, CONTRACT, PROFILES, name="backbone")
        self.memory = {
            "rows": self.device.allocate((2, 1, 4, 2), "float16"),
            "write_index": self.device.allocate((2,), "int64"),
            "past_key_0": self.device.allocate((2, 1, CAPACITY, 2), "float16"),
            "doubled": self.device.allocate((2, 1, 4, 2), "float16"),
        }

    def arrays(self, batch: int, rows: int) -> dict[str, DeviceArray]:
        memory = self.memory
        return {
            "rows": memory["rows"].view((batch, 1, rows, 2)),
            "write_index": memory["write_index"].view((batch,)),
            "past_key_0": memory["past_key_0"].view((batch, 1, CAPACITY, 2)),
            "doubled": memory["doubled"].view((batch, 1, rows, 2)),
            "present_key_0": memory["past_key_0"].view((batch, 1, CAPACITY, 2)),
        }

    def write(self, name: str, values: Any, dtype: str) -> None:
        array = np.array(values, dtype)
        self.device.upload(array, self.memory[name].view(array.shape))

    def read(self, name: str) -> NDArray[Any]:
        array = self.device.host_array(self.memory[name].shape, self.memory[name].dtype)
        self.device.download(self.memory[name], array)
        self.device.synchronize()
        return array


def test_a_pass_updates_the_cache_in_place(plan: bytes) -> None:
    setup = Setup(plan)
    engine: DeviceEngine = setup.engine
    setup.write("rows", [[[[1, 2], [3, 4]]]], "float16")
    setup.write("write_index", [3], "int64")
    engine.run(setup.arrays(1, 2))
    assert setup.read("doubled").ravel()[:4].tolist() == [2, 4, 6, 8]
    cache = setup.read("past_key_0")
    assert cache[0, 0, 3:5].tolist() == [[1, 2], [3, 4]]
    assert np.count_nonzero(cache) == 4
    # Another shape, and with it another profile, in the same spare context.
    setup.write("rows", [[[[5, 6]]], [[[7, 8]]]], "float16")
    setup.write("write_index", [0, 7], "int64")
    engine.run(setup.arrays(2, 1))
    cache = setup.read("past_key_0")
    assert cache[0, 0, [0, 3]].tolist() == [[5, 6], [1, 2]]
    assert cache[1, 0, 7].tolist() == [7, 8]


def test_a_captured_pass_does_what_an_eager_one_does(plan: bytes) -> None:
    found = []
    for is_captured in (False, True):
        setup = Setup(plan)
        one, two = setup.engine.bind(setup.arrays(1, 1)), setup.engine.bind(setup.arrays(2, 2))
        if is_captured:
            for launch in (one, two):
                launch()
            setup.device.synchronize()
            one, two = setup.device.capture(one), setup.device.capture(two)
        setup.write("rows", np.arange(1, 9).reshape(2, 1, 2, 2), "float16")
        setup.write("write_index", [2, 4], "int64")
        two()
        setup.write("rows", [[[[9, 9]]]], "float16")
        setup.write("write_index", [5], "int64")
        # A pass with a context of its own between those that are bound.
        one()
        setup.engine.run(setup.arrays(1, 3))
        setup.write("write_index", [1, 1], "int64")
        two()
        found.append((setup.read("past_key_0").tolist(), setup.read("doubled").tolist()))
        assert np.count_nonzero(setup.read("past_key_0"))
    assert found[0] == found[1]


def test_engines_compute_in_bfloat16(tmp_path: Path) -> None:
    contract = GraphSpec(
        inputs=(TensorSpec("x", ("B", 3), "bfloat16"),), outputs=(TensorSpec("y", ("B", 3), "bfloat16"),)
    )
    path = save_graph(tmp_path / "add.onnx", contract, [onnx.helper.make_node("Add", ["x", "x"], ["y"])])
    profiles: tuple[EngineProfile, ...] = ({"B": (1, 1, 4)},)
    cudart = FakeCudart()
    device = CudaDevice(cudart)
    trt = FakeTensorRT(cudart, contract, profiles)
    engine = TensorRTEngine(trt, None, device, str(path).encode(), contract, profiles)
    x, y = (device.allocate((2, 3), "bfloat16") for _ in "xy")
    host = device.host_array((2, 3), "bfloat16")
    host.view(ml_dtypes.bfloat16)[...] = [[1, 2, 3], [4, 5, 6]]
    device.upload(host, x)
    engine.run({"x": x, "y": y})
    device.download(y, host)
    device.synchronize()
    assert host.view(ml_dtypes.bfloat16).astype(float).tolist() == [[2, 4, 6], [8, 10, 12]]


def test_engines_share_their_scratch_memory(plan: bytes, tmp_path: Path) -> None:
    """One block serves all contexts of a device's engines, as large as the largest wants it."""
    setup = Setup(plan)
    contexts = ContextFactory(setup.trt, setup.device)

    def add(name: str, size: int) -> TensorRTEngine:
        path = shutil.copy(plan.decode(), tmp_path / f"{name}.onnx")
        setup.trt.scratch[name] = size
        content = str(path).encode()
        return TensorRTEngine(setup.trt, None, setup.device, content, CONTRACT, PROFILES, contexts=contexts)

    engines = [add("small", 300), add("large", 5000), add("medium", 2000)]
    before = len(setup.cudart.blocks)
    launches = [engine.bind(setup.arrays(1, 1)) for engine in engines for _ in range(2)]
    for engine in engines:
        engine.run(setup.arrays(1, 4))
    for launch in launches:
        launch()
    assert len(setup.cudart.blocks) == before + 1
    assert sorted(block.size for block in setup.cudart.blocks)[-1] == 5000
    # Steps that were captured keep the address, so an engine that comes late gets memory of its own.
    add("late", 7000).run(setup.arrays(1, 1))
    for launch in launches:
        launch()
    setup.device.close()
    assert setup.cudart.leftovers() == []


def test_attentions_share_the_memory_of_their_queries(plan: bytes) -> None:
    """Queries are outputs that no contract names. Every pass finds memory that is large enough."""
    setup = Setup(plan)
    names = ("attention_query_0", "attention_query_1")
    small, large = ((2, 1, rows, 96) for rows in (1, 4))
    setup.trt.queries = dict.fromkeys(names, small)
    engine = TensorRTEngine(setup.trt, None, setup.device, plan, CONTRACT, PROFILES)
    setup.write("rows", np.ones((2, 1, 4, 2)), "float16")
    setup.write("write_index", [0, 0], "int64")

    def allocated(shape: tuple[int, ...]) -> int:
        return [block.size for block in setup.cudart.blocks].count(2 * math.prod(shape))

    one_row = engine.bind(setup.arrays(2, 1))
    assert allocated(small) == 1
    setup.trt.queries = {names[0]: small, names[1]: large}
    four_rows = engine.bind(setup.arrays(2, 4))
    engine.bind(setup.arrays(1, 4))()
    assert allocated(large) == 1
    four_rows()
    setup.trt.queries = dict.fromkeys(names, small)
    one_row()
    assert setup.read("doubled").ravel().tolist() == [2] * 16
    setup.device.close()
    assert setup.cudart.leftovers() == []


def test_plans_that_do_not_fit_are_refused(plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="backbone: tensorrt_of_memory 0 cannot load this plan"):
        Setup(b"missing")
    # The library does not say that it lacked memory.
    monkeypatch.setattr(FakeCudart, "cudaMemGetInfo", lambda self: (0, 5, 100))
    message = (
        "out of memory: the engine's weights need about 7 bytes, 5 of the GPU's 100 bytes are free; fewer"
    )
    with pytest.raises(DeviceError, match=message):
        Setup(b"missing")
    monkeypatch.undo()
    other = GraphSpec(CONTRACT.inputs[1:], (*CONTRACT.outputs, TensorSpec("rows", ("B",), "int64")))
    with pytest.raises(DeviceError, match="the plan's tensors are not those of the bundle: rows"):
        Setup(plan, contract=other)
    unaliased = "backbone: present_key_0 must be updated in place of past_key_0, the plan has None"
    with pytest.raises(DeviceError, match=unaliased):
        Setup(plan, is_aliased=False)
    monkeypatch.delattr(FakeEngine, "get_aliased_input_tensor")
    assert Setup(plan, is_aliased=False).engine  # a library that cannot tell


def test_arrays_that_do_not_fit_are_refused(plan: bytes) -> None:
    setup = Setup(plan)
    arrays = setup.arrays(1, 2)
    narrow = DeviceArray(setup.memory["past_key_0"].address, (1, 1, 4, 2), "float16")
    wrong_shapes = {
        r"rows must have the shape \(1, 1, 2, 2\), got \(1, 2, 2\)": {"rows": arrays["rows"].view((1, 2, 2))},
        r"write_index must have the shape \(1,\), got \(2,\)": {"write_index": setup.memory["write_index"]},
        r"past_key_0 must have the shape \(1, 1, 8, 2\)": {"past_key_0": narrow, "present_key_0": narrow},
    }
    for message, changed in wrong_shapes.items():
        with pytest.raises(DeviceError, match=message):
            setup.engine.bind(arrays | changed)
    no_profile = {name: setup.memory[name].view((1, 1, 0, 2)) for name in ("rows", "doubled")}
    with pytest.raises(DeviceError, match=r"no optimisation profile takes \{'B': 1, 'N': 0\}"):
        setup.engine.run(arrays | no_profile)
    address = arrays["rows"].address
    wrong_arrays = {
        "rows must be of float16, got bfloat16": {"rows": DeviceArray(address, (1, 1, 2, 2), "bfloat16")},
        "rows must begin at a multiple of 256 bytes": {
            "rows": DeviceArray(address + 8, (1, 1, 2, 2), "float16")
        },
        "present_key_0 must have the address of past_key_0": {
            "present_key_0": setup.device.allocate((1, 1, CAPACITY, 2), "float16")
        },
        "arrays must be given for": {"logits": arrays["rows"]},
    }
    for message, changed in wrong_arrays.items():
        with pytest.raises(ValueError, match=message):
            setup.engine.bind(arrays | changed)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("set_optimization_profile_async", "refuses its optimisation profile 1"),
        ("set_input_shape", r"refuses rows of \(1, 1, 2, 2\)"),
        ("set_tensor_address", "refuses the address of rows"),
    ],
)
def test_what_the_library_refuses_leaves_the_device_usable(plan: bytes, refused: str, message: str) -> None:
    setup = Setup(plan)
    setup.trt.refused.add(refused)
    with pytest.raises(DeviceError, match=f"backbone: the plan {message}"):
        setup.engine.run(setup.arrays(1, 2))
    setup.trt.refused.clear()
    setup.engine.run(setup.arrays(1, 2))
    setup.device.synchronize()


def test_a_pass_that_the_library_refuses_makes_the_device_unusable(plan: bytes) -> None:
    setup = Setup(plan)
    launch = setup.engine.bind(setup.arrays(1, 2))
    setup.trt.refused.add("execute_async_v3")
    with pytest.raises(DeviceError, match=r"^backbone: execute_async_v3 refused a pass$"):
        launch()
    setup.trt.refused.clear()
    for call in (launch, setup.device.synchronize, lambda: setup.engine.bind(setup.arrays(1, 2))):
        with pytest.raises(DeviceError, match="cuda:0 is unusable since backbone: execute_async_v3 refused"):
            call()


def test_the_stand_in_finds_faults_of_a_pass(plan: bytes) -> None:
    setup = Setup(plan)
    stream, past = setup.device.stream, setup.memory["past_key_0"].address
    trt_engine = setup.trt.deserialize_cuda_engine(memoryview(plan))
    assert trt_engine is not None
    context = trt_engine.create_execution_context(setup.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    with pytest.raises(Fault, match="no scratch memory"):
        context.execute_async_v3(stream)
    with pytest.raises(Fault, match="scratch memory must begin at a multiple of 256"):
        context.set_device_memory(past + 8, 100)
    scratch = setup.device.allocate((1000,), "bool").address
    context.set_device_memory(scratch, 999)
    with pytest.raises(Fault, match="no scratch memory, or too little"):
        context.execute_async_v3(stream)
    context.set_device_memory(scratch, 1000)
    with pytest.raises(Fault, match="no optimisation profile was chosen"):
        context.set_input_shape("write_index", (1,))
    context.set_optimization_profile_async(0, stream)
    with pytest.raises(Fault, match=r"rows of \(1, 1, 2, 2\) is outside the profile"):
        context.set_input_shape("rows", (1, 1, 2, 2))
    with pytest.raises(Fault, match="rows has no address"):
        context.execute_async_v3(stream)
    for name, array in setup.arrays(1, 1).items():
        context.set_tensor_address(name, array.address)
    with pytest.raises(Fault, match="rows has no shape"):
        context.execute_async_v3(stream)
    for tensor in CONTRACT.inputs:
        context.set_input_shape(tensor.name, setup.arrays(1, 1)[tensor.name].shape)
    for default in (0, 99):
        with pytest.raises(Fault, match=r"work on the default stream|no stream 99"):
            context.execute_async_v3(default)
    assert not context.set_tensor_address("rows", setup.memory["rows"].address + 8)
    context.set_tensor_address("rows", setup.memory["rows"].address)
    context.set_tensor_address("present_key_0", scratch)
    with pytest.raises(Fault, match="present_key_0 must have the address of past_key_0"):
        context.execute_async_v3(stream)
    small = setup.device.allocate((1,), "float16").address
    context.set_tensor_address("present_key_0", past)
    context.set_tensor_address("doubled", small)
    with pytest.raises(Fault, match=r"4 bytes at .* reach beyond"):
        context.execute_async_v3(stream)
    context.set_tensor_address("doubled", setup.memory["doubled"].address)
    assert context.execute_async_v3(stream)
    with pytest.raises(Fault, match="memory is freed that work not yet done uses"):
        setup.cudart.cudaFree(scratch)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("doubled", "rows", "rows and doubled overlap"),
        ("doubled", "past_key_0", r"past_key_0 and doubled overlap|doubled and present_key_0 overlap"),
        ("rows", "past_key_0", "rows and present_key_0 overlap"),
    ],
)
def test_the_stand_in_finds_what_a_pass_overwrites(plan: bytes, name: str, other: str, message: str) -> None:
    """Tensors of a pass share memory only where the engine updates a cache in place."""
    setup = Setup(plan)
    arrays = setup.arrays(1, 2)
    overlapping = DeviceArray(arrays[other].address, arrays[name].shape, arrays[name].dtype)
    with pytest.raises(Fault, match=message):
        setup.engine.run(arrays | {name: overlapping})
    setup.engine.run(arrays)


def test_the_stand_in_overwrites_scratch_memory_in_every_pass(plan: bytes) -> None:
    setup = Setup(plan)
    setup.trt.scratch["cache"] = 7168
    engine = TensorRTEngine(setup.trt, None, setup.device, plan, CONTRACT, PROFILES)
    launch = engine.bind(setup.arrays(1, 1))
    (block,) = [block for block in setup.cudart.blocks if block.size == 7168]
    scratch = DeviceArray(block.start, (7168,), "bool")
    found = []
    for _ in range(2):
        setup.device.upload(np.zeros(7168, np.bool_), scratch)
        launch()
        host = setup.device.host_array((7168,), "bool")
        setup.device.download(scratch, host)
        setup.device.synchronize()
        found.append(bool(host.view(np.uint8).all()))
    assert found == [True, True]
    with pytest.raises(Fault, match="rows and the scratch memory overlap"):
        engine.run(setup.arrays(1, 1) | {"rows": DeviceArray(block.start, (1, 1, 1, 2), "float16")})


def test_a_pass_must_run_once_before_it_is_captured(plan: bytes) -> None:
    setup = Setup(plan)
    launch = setup.engine.bind(setup.arrays(1, 2))
    with pytest.raises(Fault, match="the first pass in these shapes is captured"):
        setup.device.capture(launch)
    launch()
    setup.device.synchronize()
    setup.device.capture(launch)()
    setup.device.synchronize()


def test_kernels_are_specialised_in_the_first_pass(plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a step would be captured with general kernels, if at all."""
    setup = Setup(plan)
    launch = setup.engine.bind(setup.arrays(1, 2))
    launch()
    setup.device.synchronize()
    assert can_be_captured(launch)
    setup.device.capture(launch)()
    setup.device.synchronize()
    lazily = SimpleNamespace(EAGER=FakeTensorRT.DynamicShapesKernelSpecializationStrategy.LAZY)
    monkeypatch.setattr(setup.trt, "DynamicShapesKernelSpecializationStrategy", lazily)
    lazy = setup.engine.bind(setup.arrays(1, 2))
    lazy()
    setup.device.synchronize()
    assert not can_be_captured(lazy)
    with pytest.raises(Fault, match="kernels are not specialised yet"):
        setup.device.capture(lazy)


def test_contexts_share_the_compiled_kernels(plan: bytes) -> None:
    setup = Setup(plan)
    setup.engine.bind(setup.arrays(1, 1))
    setup.engine.run(setup.arrays(1, 4))
    managed = FakeTensorRT.ExecutionContextAllocationStrategy.USER_MANAGED
    first, second = setup.trt.settings
    assert first is not second
    assert first.cache is second.cache is not None
    assert first.allocation == second.allocation == managed


def test_compiled_kernels_are_kept_for_the_next_process(
    plan: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that is damaged, of another version, or that cannot be written costs only time."""
    caplog.set_level("INFO")

    def compiled(path: Path, **changes: Any) -> int:
        setup = Setup(plan)
        for name, value in changes.items():
            setattr(setup.trt, name, value)
        contexts = ContextFactory(setup.trt, setup.device, KernelFile(path))
        engine = TensorRTEngine(
            *(setup.trt, None, setup.device, plan, CONTRACT, PROFILES), name="backbone", contexts=contexts
        )
        engine.run(setup.arrays(1, 1))
        engine.run(setup.arrays(1, 4))
        setup.device.synchronize()
        contexts.keep_kernels()
        return setup.trt.num_compiled

    path = tmp_path / "some" / "kernels.bin"
    assert [compiled(path) for _ in range(2)] == [2, 0]
    (kept,) = path.parent.iterdir()
    assert kept == path
    assert compiled(path, __version__="1") == 2
    assert compiled(path, __version__="1") == 0
    path.write_bytes(b"damaged")
    assert [compiled(path) for _ in range(2)] == [2, 0]
    (tmp_path / "file").touch()
    assert compiled(tmp_path / "file" / "kernels.bin") == 2
    assert "compiled kernels cannot be read from" in caplog.text
    assert "the library refuses the compiled kernels of" in caplog.text
    path.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_half)
        assert compiled(path) == 2
    assert f"compiled kernels cannot be written to {path}: no space" in caplog.text
    assert not list(path.parent.iterdir())


def write_half(path: Path, content: bytes) -> None:
    """As ``Path.write_bytes`` on a full disk."""
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(28, "no space")


def test_the_file_of_kernels_is_named_by_what_compiled_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart()
    device, trt = CudaDevice(cudart), FakeTensorRT(cudart)
    monkeypatch.delenv("CTC_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = kernel_file(trt, device)
    assert found is not None
    name = "tensorrt_of_memory-0-Device_of_memory_sm89-cuda_13000.bin"
    assert found._path == tmp_path / "ctc-speculator" / "kernels" / name
    monkeypatch.setenv("CTC_KERNEL_CACHE", str(tmp_path / "own"))
    found = kernel_file(trt, device)
    assert found is not None
    assert found._path == tmp_path / "own" / name
    monkeypatch.setenv("CTC_KERNEL_CACHE", "")
    assert kernel_file(trt, device) is None


def test_without_a_place_or_a_known_gpu_no_kernels_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    cudart = FakeCudart()
    device, trt = CudaDevice(cudart), FakeTensorRT(cudart)
    with monkeypatch.context() as patch:
        patch.delenv("CTC_KERNEL_CACHE", raising=False)
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", no_home)
        assert kernel_file(trt, device) is None
    monkeypatch.setattr(FakeCudart, "cudaGetDeviceProperties", lambda self, index: (35, None))
    assert kernel_file(trt, device) is None
    first, second = caplog.messages
    assert first == "compiled kernels are not kept: Could not determine home directory."
    assert second == "compiled kernels are not kept: cudaGetDeviceProperties: error 35"


def test_a_pass_that_cannot_be_captured_is_launched_each_time(
    plan: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(plan)
    setup.trt.refused.add("is_stream_capturable")
    programs = [
        Program(setup.device, [("verify", [setup.engine.bind(setup.arrays(1, 1))])]) for _ in range(2)
    ]
    setup.write("rows", [[[[1, 2]]]], "float16")
    for _ in range(3):
        for program in programs:
            program.run(capture=True)
    assert setup.read("doubled").ravel()[:2].tolist() == [2, 4]
    assert setup.cudart.executables == {}
    assert [record.getMessage() for record in caplog.records] == [
        "backbone: the library cannot record its passes; steps with it are launched pass by pass, slower"
    ]


def test_tensorrt_has_no_settings_of_contexts(plan: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorRT for RTX has beyond it is not asked for."""

    def create(self: FakeEngine, strategy: int = 0) -> FakeContext:
        assert strategy == FakeTensorRT.ExecutionContextAllocationStrategy.USER_MANAGED
        return FakeContext(self, self._library, 0, 0)

    monkeypatch.setattr(FakeEngine, "create_execution_context", create)
    monkeypatch.delattr(FakeEngine, "create_runtime_config")
    monkeypatch.delattr(FakeContext, "is_stream_capturable")
    monkeypatch.delattr(FakeTensorRT, "DynamicShapesKernelSpecializationStrategy")
    setup = Setup(plan)
    launch = setup.engine.bind(setup.arrays(1, 2))
    launch()
    setup.device.synchronize()
    assert can_be_captured(launch)


def test_the_stand_in_has_only_what_the_library_has() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", exc_type=ImportError)
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    pairs = (
        (FakeEngine, trt.ICudaEngine),
        (FakeContext, trt.IExecutionContext),
        (FakeRuntimeConfig, trt.IRuntimeConfig),
        (FakeRuntimeCache, trt.IRuntimeCache),
    )
    for fake, real in (*pairs, (FakeTensorRT, trt.Runtime)):
        for name, member in vars(fake).items():
            if name.startswith("_") or name == "Runtime" or isinstance(member, type):
                continue
            assert hasattr(real, name), name
            if inspect.isfunction(member):
                parameters = list(inspect.signature(member).parameters)[1:]
                assert parameters in signatures(getattr(real, name).__doc__), name
    kinds = [
        each for each in vars(FakeTensorRT).values() if isinstance(each, type) and issubclass(each, IntEnum)
    ]
    assert len(kinds) == 3
    for kind in kinds:
        members = getattr(trt, kind.__name__).__members__
        assert {m.name: m.value for m in kind} == {m.name: int(members[m.name]) for m in kind}
    strategy = trt.IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy
    assert isinstance(strategy, property)
    assert strategy.fset
    assert {"__name__", "__version__"} <= vars(trt).keys()


def signatures(docstring: str) -> list[list[str]]:
    """The names of the parameters of every overload of a function of the bindings."""
    lines = re.findall(r"^(?:\d+\. )?\w+\((self: .*)\) ->", docstring, re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+): ", line)[1:] for line in lines]


def test_the_library_refuses_what_is_no_plan() -> None:
    pytest.importorskip("tensorrt_rtx_bindings", exc_type=ImportError)
    trt: Any = importlib.import_module("tensorrt_rtx_bindings")
    device = CudaDevice(FakeCudart())
    log = trt.Logger(trt.Logger.INTERNAL_ERROR)
    with pytest.raises(DeviceError, match=r"engine: tensorrt_rtx_bindings [\d.]+ cannot load this plan"):
        TensorRTEngine(trt, log, device, b"not a plan" * 100, CONTRACT, PROFILES)
