"""The engine of PyTorch: graphs of every kind of head against ONNX Runtime, and texts against the host."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.__main__ import main as gpu_main
from benchmarks.gpu.engine_gate import check_engines
from export.options import Options
from export.verify.runner import DevicePasses
from runtime.core.bundle import Bundle, GraphSpec, TensorSpec
from runtime.core.errors import BundleError, DeviceError, DeviceMemoryError, RequestError
from runtime.decoder import SpeculativeDecoder
from runtime.device.cuda import CudaDevice
from runtime.device.device import write_array
from runtime.device.program import Program
from runtime.device.pytorch.device import TorchDevice, open_torch_device
from runtime.device.pytorch.engine import TorchEngine
from runtime.device.pytorch.graph import read_graph
from runtime.device.pytorch.layers import PACKED_PRODUCT
from runtime.device.step import GraphStep
from runtime.engines.ort_wheel import ort
from runtime.load.engines import device_opener
from tests.batch_runs import decode_together, mixed_requests
from tests.conftest import PROMPTS
from tests.device_of_memory import FakeCudart
from tests.engine_bundles import as_torch_bundle

MAX_LENGTH = 160
# Functions of torch that wait for a value of the device, or for the size of their result.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave.Tensor")


@pytest.fixture(scope="module")
def torch_bundle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes a bundle for PyTorch of one for ONNX Runtime."""
    return functools.cache(
        lambda source: as_torch_bundle(source, tmp_path_factory.mktemp("torch") / "bundle")
    )


@pytest.fixture(scope="module", params=["ctc", "ctc-mlp", "medusa", "hydra", "hydra++", "eagle", "streaming"])
def head_bundle(request: pytest.FixtureRequest) -> Path:
    """A bundle with the graphs of device steps, of every kind of head that has them."""
    name: str = request.param
    find = request.getfixturevalue
    if name in ("hydra", "hydra++", "eagle"):
        return Path(find("level_bundle_of")(name))
    if name == "streaming":
        return Path(find("own_pass_bundle_of")(name))
    return Path(find("make_tiny_bundle")(find("trained_heads_dir") / name, Options(step_nodes=(4, 8))))


def test_every_graph_computes_what_onnx_runtime_computes(
    head_bundle: Path, torch_bundle_of: Callable[[Path], Path]
) -> None:
    bundle = Bundle.load(torch_bundle_of(head_bundle))
    prompts = [[5, 6, 7, 8, 9], list(range(10, 40))]
    found = check_engines(bundle, Bundle.load(head_bundle, verify=False), "cpu", prompts, 1)
    assert found.keys() == bundle.manifest.graphs.keys()
    assert all(each.passes and not each.problems for each in found.values()), found


class WithoutWaiting(TorchDispatchMode):
    """Raises AssertionError for a function of torch that would wait for the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(function) for name in WAITS), f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.fixture
def passes_without_waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every pass is watched; gives the names of those that ran."""
    ran: list[str] = []
    really = TorchDevice.put_work

    def watched(self: TorchDevice, work: Any) -> None:
        ran.append("pass")
        with WithoutWaiting():
            really(self, work)

    monkeypatch.setattr(TorchDevice, "put_work", watched)
    return ran


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"verify": False, "num_threads": 1, "num_nodes": 8, **options}
    )


def test_batches_write_what_the_host_writes(
    tiny_step_bundle: Path,
    torch_bundle_of: Callable[[Path], Path],
    passes_without_waiting: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy requests and such that draw their tokens join and leave, and no pass waits for a value.

    Steps, of one sequence or three, and prompts read the caches up to each of three lengths, which texts
    reach in their middle.
    """
    monkeypatch.setattr("runtime.load.device.batch_sizes", lambda max_num_seqs: [1, 3])
    monkeypatch.setattr("runtime.device.plan.SHORTEST_READ", 64)
    monkeypatch.setattr("runtime.device.plan.PROMPT_SIZES", (16,))
    host = load(tiny_step_bundle, step="host")
    requests = mixed_requests([host.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)])
    expected = [
        [token for chunk in host.stream(prompt, **options) for token in chunk.token_ids]
        for prompt, options in requests
    ]
    device = load(
        torch_bundle_of(tiny_step_bundle), step="graph", device="cpu", max_num_seqs=3, max_length=MAX_LENGTH
    )
    assert decode_together(device, requests, np.random.default_rng(0)) == expected
    assert len(passes_without_waiting) > 100
    runner = device.batch.runner
    assert isinstance(runner, GraphStep)
    # Passes read 64, 128 and 184 positions, 24 of them behind the text.
    assert {length for *_, length in runner._steps} == {40, 104, 160}
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        list(device.stream([5], max_new_tokens=4))


def test_a_bundle_of_the_target_in_half_precision(
    tiny_model_dir: Path,
    trained_heads_dir: Path,
    tiny_step_bundle: Path,
    copied_graphs: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from export.build_engines import build

    plain = ("accept", "accept_sampled", "search_0", "search_4", "prepare", "commit")
    options = Options(precision="fp16", drafter_precision="int4", step_nodes=(4,))
    with copied_graphs(**dict.fromkeys(plain, tiny_step_bundle)):
        bundle = build(
            tiny_model_dir,
            tmp_path / "bundle",
            drafter_dir=trained_heads_dir / "ctc",
            target_name="torch",
            options=options,
        )
    assert bundle.manifest.target == "torch"
    operators = {node.op_type for node in onnx.load(bundle.path / "backbone.onnx").graph.node}
    assert "Attention" in operators
    # Passes that read a part of the caches are compared too.
    monkeypatch.setattr("runtime.device.plan.SHORTEST_READ", 128)
    found = check_engines(bundle, bundle, "cpu", [[5, 6, 7]], 1)
    inputs = [tensor.name for tensor in bundle.manifest.graphs["backbone"].inputs]
    mask, cache = inputs.index("attn_mask"), inputs.index("past_key_0")
    parts = [each[mask][3] / each[cache][2] for each in found["backbone"].shapes]
    assert len(set(parts)) > 1
    assert all(each.passes for name, each in found.items()), found
    assert not any(each.problems for each in found.values()), found
    # A bundle for GPUs runs its steps on a device, unless it is said otherwise.
    decoder = load(bundle.path, device="cpu")
    assert decoder.batch.runner.tree_sizes == (0, 4)
    assert len(list(decoder.stream([5, 6], max_new_tokens=8))) > 1
    # The host runs no steps whose caches are in half precision, so texts are compared with one another alone.
    flags = "--device cpu --parts gate,lossless --batches 1 --max-prompts 1 --max-new-tokens 4 --contexts 64"
    settings = ["--reference", str(bundle.path), *flags.split(), "--threads", "1"]
    assert gpu_main(["--bundle", str(bundle.path), "--out", str(tmp_path / "gpu"), *settings]) == 0
    report = (tmp_path / "gpu/gpu.md").read_text(encoding="utf-8")
    assert "engines compute what the reference computes" in report
    assert "reference prefers" not in report


def engine_of(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    path: Path,
    constants: Sequence[Any] = (),
) -> TorchEngine:
    """A graph of these nodes for inputs and outputs of these values, its file, and its constants beside."""

    def infos(values: dict[str, Any]) -> list[Any]:
        return [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in values.items()
        ]

    def specs(values: dict[str, Any]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, value.shape, str(value.dtype)) for name, value in values.items())

    graph = helper.make_graph(nodes, "graph", infos(inputs), infos(outputs), constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        location=f"{path.name}.data",
        size_threshold=0,
        convert_attribute=False,
    )
    contract = GraphSpec(specs(inputs), specs(outputs))
    return TorchEngine(TorchDevice("cpu"), read_graph(path), contract, name="graph")


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).integers(-4, 5, shape).astype(dtype)


def ints(*values: int) -> Any:
    """A node that gives these numbers."""
    return np.array(values, np.int64)


F, HALVES = numbers(2, 3, 4), numbers(2, 3, 4) / 2
PLACES = np.array([[0, 2, 1], [2, 2, 0]])
# Operator, inputs and attributes. Arrays that hold int64 in one axis are constants of the graph.
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((name, [HALVES], {}) for name in ("Abs", "Ceil", "Erf", "Floor", "Neg", "Relu", "Softplus", "Tanh")),
    *((name, [np.abs(F) + 1], {}) for name in ("Log", "Reciprocal", "Sqrt", "IsNaN", "IsInf", "Identity")),
    *((name, [F, HALVES], {}) for name in ("Less", "LessOrEqual", "Greater", "Equal", "Pow", "Min", "Max")),
    *((name, [F > 0, HALVES > 0], {}) for name in ("And", "Or", "Xor")),
    ("Div", [numbers(4, dtype="int64") * 3, np.full((4,), 2)], {}),
    ("Mod", [numbers(4, 2, dtype="int64"), np.full((4, 2), 3)], {}),
    ("Mod", [F, np.full((4,), 3, np.float32)], {"fmod": 1}),
    ("Clip", [F, np.float32(-1), np.float32(2)], {}),
    ("ArgMin", [F], {"axis": 1, "keepdims": 0}),
    ("ReduceMean", [F, ints(-1, 0)], {"keepdims": 0}),
    ("ReduceSum", [F], {"noop_with_empty_axes": 1}),
    ("ReduceSum", [F, ints(1)], {}),
    ("ReduceMin", [F], {"keepdims": 0}),
    ("Softmax", [F], {"axis": 1}),
    ("LogSoftmax", [F], {}),
    ("CumSum", [numbers(3, 4, dtype="int64"), np.array(1)], {}),
    ("TopK", [numbers(2, 40), ints(7)], {}),
    ("TopK", [numbers(2, 5000) + np.arange(5000, dtype=np.float32) * 1e-3, ints(6)], {"largest": 0}),
    ("Reshape", [F, ints(0, -1)], {}),
    ("Flatten", [F], {"axis": 2}),
    ("Squeeze", [F[:1], ints(0)], {}),
    ("Squeeze", [F[:, :1]], {}),
    ("Unsqueeze", [F, ints(0, -1)], {}),
    ("Transpose", [F], {}),
    ("Expand", [F[:, :1], ints(3, 1)], {}),
    ("Tile", [F, ints(1, 2, 3)], {}),
    ("Slice", [F, ints(-1), ints(-(2**63)), ints(2), ints(-2)], {}),
    ("Slice", [F, ints(0, 1), ints(1, 2**63 - 1), ints(0, -1)], {}),
    ("Slice", [F, ints(3), ints(1), ints(1)], {}),
    ("Pad", [F, ints(1, 0, 2, 0, 0, 1)], {}),
    ("Pad", [F, ints(1, 2), np.float32(7), ints(1)], {}),
    ("Gather", [F, ints(-1, 0)], {"axis": 2}),
    ("Gather", [F, PLACES], {"axis": 1}),
    ("Gather", [F, np.array(-1)], {"axis": 1}),
    ("GatherElements", [F[0].copy(), PLACES], {"axis": 1}),
    ("GatherND", [F, PLACES[:, :2].clip(0, 1)], {}),
    ("ScatterElements", [F[0].copy(), PLACES, HALVES[:, :, 0].copy()], {"axis": 1, "reduction": "max"}),
    ("ScatterElements", [F[0].copy(), PLACES[:, :2] * 0 + [0, 1], F[1, :2, :2].copy()], {"axis": 1}),
    ("ScatterND", [F, np.array([[1, 0], [0, 2]]), HALVES[0, :2].copy()], {}),
    ("Gemm", [F[0].copy(), F[1].copy(), np.ones(3, np.float32)], {"transB": 1, "alpha": 0.5}),
    ("Gelu", [HALVES], {"approximate": "tanh"}),
    ("LayerNormalization", [F, np.arange(4, dtype=np.float32)], {"epsilon": 1e-3}),
    ("RMSNormalization", [HALVES, np.arange(4, dtype=np.float32)], {"epsilon": 1e-3}),
    ("RMSNormalization", [HALVES, np.arange(4, dtype=np.float32).reshape(1, 1, 4)], {}),
    ("RMSNormalization", [HALVES, numbers(3, 1)], {"axis": 1}),
    ("RotaryEmbedding", [numbers(2, 3, 5, 8), numbers(2, 5, 4), numbers(2, 5, 4)], {"interleaved": 1}),
    (
        "RotaryEmbedding",
        [numbers(2, 5, 24), numbers(9, 2), numbers(9, 2), np.array([[0, 1, 2, 3, 8]] * 2)],
        {"num_heads": 3, "rotary_embedding_dim": 4},
    ),
    ("Attention", [numbers(2, 6, 3, 8), numbers(2, 2, 5, 8), numbers(2, 2, 5, 8)], {}),
    (
        "Attention",
        [numbers(2, 6, 3, 8), numbers(2, 2, 5, 8), numbers(2, 2, 5, 8), numbers(2, 1, 3, 5) > -3],
        {"scale": 0.5},
    ),
]


def constant(name: str, value: Any) -> Any:
    return helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(np.asarray(value)))


@pytest.mark.parametrize(
    ("operator", "values", "attributes"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_an_operator(operator: str, values: list[Any], attributes: dict[str, Any], tmp_path: Path) -> None:
    names = [f"input_{index}" for index in range(len(values))]
    constants, inputs = [], {}
    for name, given in zip(names, values, strict=True):
        value = np.asarray(given)
        if value.dtype == np.int64 and value.ndim <= 1 and operator != "Div":
            constants.append(constant(name, value))
        else:
            inputs[name] = np.ascontiguousarray(value)
    if operator == "Pad" and len(values) > 2:  # a value to pad with is a constant too
        names, inputs = [names[0], names[1], "fill", names[3]], {names[0]: inputs[names[0]]}
        constants.append(constant("fill", values[2]))
    results = ["output", "places"] if operator == "TopK" else ["output"]
    nodes = [*constants, helper.make_node(operator, names, results, **attributes)]
    path = tmp_path / "graph.onnx"
    # The shapes of results are those that ONNX Runtime finds.
    outputs = [helper.make_empty_tensor_value_info(name) for name in results]
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in inputs.items()
        ],
        outputs,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = dict(zip(results, session.run(None, inputs), strict=True))
    engine = engine_of(nodes, inputs, expected, path)
    found = DevicePasses(engine._device, engine, engine._contract)(inputs)
    for name in results:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "block_size", "operators"),
    [(48, 32, [PACKED_PRODUCT]), (40, 32, ["MatMul"]), (48, 16, ["MatMul"])],
    ids=["packed", "columns", "block"],
)
def test_products_with_int4_weights(
    columns: int, block_size: int, operators: list[str], tmp_path: Path
) -> None:
    """Where the kernel does not take the matrix, it is restored once when the engine is made."""
    rng = np.random.default_rng(0)
    codes = rng.integers(-7, 8, (96, columns)).astype(ml_dtypes.int4)
    scales = (rng.random((96 // block_size, columns)) / 10).astype(np.float32)
    rows = rng.standard_normal((2, 3, 96)).astype(np.float32)
    names = ("codes", "scales")
    nodes = [
        helper.make_node("DequantizeLinear", names, ["matrix"], axis=0, block_size=block_size),
        helper.make_node("MatMul", ["rows", "matrix"], ["output"]),
    ]
    constants = [
        onnx.numpy_helper.from_array(each, name) for each, name in zip((codes, scales), names, strict=True)
    ]
    expected = rows @ (codes.astype(np.float32) * scales.repeat(block_size, 0))
    engine = engine_of(nodes, {"rows": rows}, {"output": expected}, tmp_path / "g.onnx", constants)
    assert [node.operator for node in engine._nodes] == operators
    found = DevicePasses(engine._device, engine, engine._contract)({"rows": rows})
    np.testing.assert_allclose(found["output"], expected, rtol=1e-5, atol=1e-5)


def test_an_operator_that_is_missing_is_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["a"], ["b"]), helper.make_node("Det", ["c"], ["d"])]
    with pytest.raises(DeviceError, match=r"^graph: the target torch has no operators Det, NonZero$"):
        engine_of(nodes, {"a": F, "c": F[:, :3, :3]}, {"b": PLACES, "d": F[:, 0, 0]}, tmp_path / "g.onnx")


def test_a_shape_that_only_the_device_knows_is_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Reshape", ["a", "shape"], ["b"])]
    engine = engine_of(nodes, {"a": F, "shape": ints(4, 6)}, {"b": numbers(4, 6)}, tmp_path / "g.onnx")
    with pytest.raises(DeviceError, match="Reshape '' reads 'shape', which decides over a shape"):
        DevicePasses(engine._device, engine, engine._contract)({"a": F, "shape": ints(4, 6)})


def test_a_cache_is_updated_in_place_and_not_read_as_it_was(tmp_path: Path) -> None:
    past, new = numbers(2, 1, 6, 3), numbers(2, 1, 2, 3) + 10
    inputs = {"past_key": past, "new": new, "start": ints(1, 4)}
    write = helper.make_node("TensorScatter", ["past_key", "new", "start"], ["present_key"], axis=2)
    engine = engine_of([write], inputs, {"present_key": past}, tmp_path / "g.onnx")
    expected = past.copy()
    expected[0, :, 1:3], expected[1, :, 4:6] = new
    found = DevicePasses(engine._device, engine, engine._contract)(inputs)
    np.testing.assert_array_equal(found["present_key"], expected)
    first = helper.make_node("Transpose", ["past_key"], ["view"], perm=[0, 1, 3, 2])
    last = helper.make_node("Neg", ["view"], ["old"])
    outputs = {"present_key": past, "old": past.swapaxes(2, 3)}
    engine = engine_of([first, write, last], inputs, outputs, tmp_path / "g.onnx")
    with pytest.raises(DeviceError, match="view is read after it was updated in place"):
        DevicePasses(engine._device, engine, engine._contract)(inputs)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    add = [helper.make_node("Add", ["a", "b"], ["c"])]
    engine = engine_of(add, {"a": F, "b": F[:, :2]}, {"c": F}, tmp_path / "g.onnx")
    with pytest.raises(DeviceError, match=r"^graph: Add '' does not take .*'b': \(2, 2, 4\)"):
        DevicePasses(engine._device, engine, engine._contract)({"a": F, "b": F[:, :2]}, {"c": F.shape})
    engine = engine_of(add, {"a": F, "b": F}, {"c": F[:1]}, tmp_path / "g.onnx")
    with pytest.raises(DeviceError, match=r"c has the shape \(2, 3, 4\) for these inputs, got .*\(1, 3, 4\)"):
        DevicePasses(engine._device, engine, engine._contract)({"a": F, "b": F})


def test_copies_of_the_device() -> None:
    device = TorchDevice("cpu")
    source, target = (device.allocate((4, 3), "float32") for _ in range(2))
    write_array(device, source, numbers(4, 3))
    device.copy_blocks(source.rows(1, 4), target.rows(0, 3), count=3, size=8, pitch=12)
    found = device.host_array((4, 3), "float32")
    device.download(target, found)
    expected = np.zeros((4, 3), np.float32)
    expected[:3, :2] = numbers(4, 3)[1:, :2]
    np.testing.assert_array_equal(found, expected)
    device.copy(source.rows(3, 4), target.rows(0, 1))
    device.clear(target.rows(1, 3))
    device.download(target, found)
    np.testing.assert_array_equal(found, [numbers(4, 3)[3], *[[0, 0, 0]] * 3])
    with pytest.raises(ValueError, match="do not fit"):
        device.copy_blocks(source, target, count=5, size=8, pitch=12)
    with pytest.raises(ValueError, match="not in memory of cpu"):
        TorchDevice("cpu").clear(source)
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="cpu is closed"):
        device.synchronize()


def test_a_device_lives_on_where_the_host_has_no_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TorchDevice("cpu")
    device.is_gpu = True

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        expected = r"^cudaHostAlloc: CUDA error: out of memory: 16 bytes of the host's memory wanted, .*low$"
        with pytest.raises(DeviceMemoryError, match=expected):
            device.host_array((4,), "float32")
    device.is_gpu = False
    with pytest.raises(DeviceMemoryError, match=r"can't allocate memory.*; smaller max_length, "):
        device.allocate((2**50,), "bool")
    assert device.host_array((4,), "float32").tolist() == [0] * 4


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_torch_device("cpu", None).name == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("runtime.device.pytorch.device.TorchDevice", lambda name: MagicMock(opened=name))
    for name, opened in ((None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert open_torch_device(name, None).opened == opened  # type: ignore[attr-defined]
    for name in ("gpu", "cuda:x", "cuda:-1", "cpu:0", "mps", "xpu:0"):
        with pytest.raises(RequestError, match=r"^device: must be cpu, cuda:0, cuda:1 and so on, got"):
            open_torch_device(name, None)
    with pytest.raises(DeviceError, match=r"^cuda:2: this machine has 2 GPUs, counted from cuda:0"):
        open_torch_device("cuda:2", None)


def test_what_was_given_last_is_released_first() -> None:
    """A module of kernels before the context that it is in."""
    released: list[int] = []
    for device in (TorchDevice("cpu"), CudaDevice(FakeCudart())):
        for number in range(3):
            device.at_close(partial(released.append, number))
        device.close()
    assert released == [2, 1, 0, 2, 1, 0]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The GPU and the stream that a stand-in for ``torch.cuda`` has selected; streams are numbered texts."""
    current: dict[str, Any] = {"device": 3, "stream": "of other code"}
    made: list[str] = []

    def stream(device: torch.device) -> str:
        made.append(f"stream {len(made)}")
        return made[-1]

    fakes: dict[str, Any] = {
        "Stream": stream,
        "graph_pool_handle": lambda: None,
        "current_device": lambda: current["device"],
        "current_stream": lambda: current["stream"],
        "set_device": lambda device: current.update(device=device.index),
        "set_stream": lambda stream: current.update(stream=stream),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return current


def test_devices_of_one_thread_keep_to_their_own_streams(current: dict[str, Any]) -> None:
    """A decoder that plain steps and one that drafts each have a device, and take turns."""
    first, second = TorchDevice("cuda:0"), TorchDevice("cuda:0")
    for device, expected in ((first, "stream 0"), (second, "stream 1"), (first, "stream 0")):
        found: list[dict[str, Any]] = []
        device.put_work(lambda found=found: found.append(dict(current)))  # type: ignore[misc]
        assert found == [{"device": 0, "stream": expected}]
    current["device"] = 3
    first.select()
    assert current == {"device": 0, "stream": "stream 0"}


def test_two_threads_capture_one_after_the_other(
    current: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two decoders that are loaded at the same time."""
    events: list[str] = []

    @contextlib.contextmanager
    def graph(graph: Any, *, stream: str, **options: Any) -> Iterator[None]:
        events.append(f"{stream} begins")
        yield
        events.append(f"{stream} ends")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    first, second = TorchDevice("cuda:0"), TorchDevice("cuda:0")
    other = threading.Thread(target=second.capture, args=[lambda: None])

    def work() -> None:
        other.start()
        other.join(0.2)  # Where it does not wait, it ends at once.

    first.capture(work)
    other.join()
    assert events == ["stream 0 begins", "stream 0 ends", "stream 1 begins", "stream 1 ends"]


def test_a_program_without_work_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps have nothing to commit."""
    device = TorchDevice("cpu")
    captured: list[Any] = []
    monkeypatch.setattr(device, "capture", captured.append)
    program = Program(device, [("commit", [])])
    for _ in range(3):
        program.run(capture=True)
    assert captured == []


def test_what_is_missing_is_named(
    tiny_step_bundle: Path,
    torch_bundle_of: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle = Bundle.load(torch_bundle_of(tiny_step_bundle))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = r"^cuda:0: torch .* finds no GPU on this machine; ctc generate --device cpu runs it here$"
    with pytest.raises(DeviceError, match=message):
        device_opener(bundle)(bundle, None, None)
    for name in [name for name in sys.modules if name.startswith("runtime.device.pytorch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BundleError, match=r"target torch: torch cannot be imported; pip install .*torch-gpu"):
        device_opener(bundle)(bundle, None, None)


def test_weights_beside_the_file_are_read_in_every_type(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    weights = {
        name: helper.make_tensor(name, kind, (20, 20), (np.arange(400) % 7).tolist())
        for name, kind in (("half", TensorProto.FLOAT16), ("brain", TensorProto.BFLOAT16))
    }
    nodes = [helper.make_node("Cast", [name], [f"out_{name}"], to=TensorProto.FLOAT) for name in weights]
    infos = [helper.make_tensor_value_info(f"out_{name}", TensorProto.FLOAT, (20, 20)) for name in weights]
    graph = helper.make_graph(nodes, "graph", [], infos, list(weights.values()))
    onnx.save(
        helper.make_model(graph),
        path,
        save_as_external_data=True,
        location="graph.data",
        size_threshold=0,
        convert_attribute=False,
    )
    constants = read_graph(path).constants
    for tensor in constants.values():
        np.testing.assert_array_equal(tensor.float().reshape(-1), np.arange(400) % 7)
