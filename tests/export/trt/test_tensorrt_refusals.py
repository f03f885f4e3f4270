"""What cannot be compiled is refused with one line, and leaves no half of a bundle behind."""

import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from export import build_engines
from export.errors import ExportError
from export.options import Options
from export.trt import compiler
from export.trt.compiler import check_capabilities, check_timing_cache, load_library
from export.trt.plan import GIB, check_memory, draft_plan
from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.load.host import load_target_model

pytest.importorskip(
    "tensorrt_rtx_bindings", reason="TensorRT for RTX has no wheel for this platform", exc_type=ImportError
)

Copied = Callable[..., AbstractContextManager[None]]


@pytest.fixture
def command(
    tiny_model_dir: Path,
    tiny_drafter_dir: Path,
    tiny_bundle_dir: Path,
    copied_graphs: Copied,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Runs ``build_engines`` for the tiny model; its status, and the last line on stderr."""

    def run(out: Path, *flags: str) -> tuple[int, str]:
        paths = ["--model", str(tiny_model_dir), "--drafter", str(tiny_drafter_dir), "--out", str(out)]
        with copied_graphs(backbone=tiny_bundle_dir, drafter=tiny_bundle_dir):
            status = build_engines.main([*paths, "--target", "tensorrt-rtx", "--step-nodes", "none", *flags])
        return status, capsys.readouterr().err.strip().splitlines()[-1]

    return run


def snapshot(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precision fp16", "--gpu: tensorrt-rtx needs the GPUs to compile for, of sm75, sm80, "),
        (
            "--precision fp16 --gpu sm90",
            "compiles for sm75, .*got 'sm90'; the data-centre GPUs .* --target tensorrt",
        ),
        ("--precision fp8 --gpu sm120,sm86", "--gpu: fp8 needs sm89 or later, got sm86"),
        ("--precision bf16 --gpu sm75", "--gpu: bf16 needs sm80 or later, got sm75"),
        ("--precision int4 --activations bf16 --gpu sm75", "--gpu: bf16 needs sm80 or later, got sm75"),
        ("--precision fp16 --gpu sm89 --gpu-memory nan", "--gpu-memory: must be above 0, got nan"),
        (
            "--precision fp16 --drafter-precision fp16 --gpu sm89 --activations bf16",
            "--activations: is for the precisions int8, ",
        ),
        (
            "--precision fp16 --gpu sm89 --timing-cache /proc/x/y",
            "--timing-cache: /proc/x/y cannot be written",
        ),
        (
            "--precision fp16 --gpu sm89 --timing-cache /proc",
            "--timing-cache: /proc is a directory; expected a file",
        ),
        ("--precision fp16 --gpu sm89 --max-batch 0", "--max-batch: must be between 1 and 256, got 0"),
        ("--precision fp16 --gpu sm89 --max-nodes 513", "--max-nodes: must be between 1 and 512, got 513"),
        (
            "--precision fp16 --gpu sm89 --max-context 1024",
            "--max-context: must be between 1 and 512, got 1024",
        ),
        (
            "--precision fp16 --gpu sm89 --max-batch 64 --gpu-memory 0.01",
            r"--gpu-memory: the engines need 0.0\d GiB, 0.0\d GiB of it for caches, got 0.01 GiB",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    command: Callable[..., tuple[int, str]], tmp_path: Path, flags: str, message: str
) -> None:
    status, line = command(tmp_path / "out", *flags.split())
    assert status == 2
    assert line == line.strip()
    assert re.search(message, line), line
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_leaves_an_earlier_bundle(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert command(out, *["--precision", "fp16", "--gpu", "sm89"])[0] == 0
    before = snapshot(out)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Engines have some megabytes, and the ONNX files before them less than one.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        status, line = command(out, *["--precision", "fp16", "--gpu", "sm89"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, line) == (2, f"build_engines: --out: {out} cannot be written: File too large")
    assert snapshot(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_cancels_a_build(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bar:
        """Presses Ctrl-C at the hundredth step of compiling the target model."""

        def __init__(self, desc: str, **_: Any) -> None:
            self.is_target_model = desc == "compiling backbone"
            self.count = 0

        def update(self) -> None:
            self.count += self.is_target_model
            if self.count == 100:
                os.kill(os.getpid(), signal.SIGINT)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(compiler, "tqdm", Bar)
    status, line = command(tmp_path / "out", *["--precision", "fp16", "--gpu", "sm89"])
    assert (status, line) == (130, "build_engines: interrupted, nothing was written")
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGINT) is handler


def test_builds_at_the_same_time_write_one_timing_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replaces the file as a whole, though the other has done so meanwhile."""
    path = tmp_path / "timing"
    first, second = (SimpleNamespace(serialize=lambda content=content: content) for content in (b"1", b"2"))
    write = Path.write_bytes

    def slow(scratch: Path, content: bytes) -> int:
        size = write(scratch, content)
        if content == b"1":
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: 0)
                compiler._save_timing_cache(second, path)
        return size

    monkeypatch.setattr(Path, "write_bytes", slow)
    compiler._save_timing_cache(first, path)
    assert snapshot(tmp_path) == {"timing": b"1"}


def test_a_directory_that_cannot_be_written_takes_no_timing_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ExportError, match=f"^--timing-cache: {tmp_path} cannot be written; choose another"):
        check_timing_cache(tmp_path / "timing")


def test_a_bundle_has_its_plan_and_is_not_run_by_onnx_runtime(
    command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "timing"
    flags = f"--precision int8 --gpu sm89,sm120 --max-batch 2 --max-nodes 8 --timing-cache {cache}"
    assert command(tmp_path / "out", *flags.split())[0] == 0
    bundle = build_engines.Bundle.load(tmp_path / "out")
    plan = bundle.manifest.engine_plan
    assert plan is not None
    assert plan.capabilities == ("sm89", "sm120")
    assert plan.library.startswith("tensorrt-rtx 1.")
    assert (plan.max_context, plan.max_num_seqs, plan.max_nodes) == (512, 2, 8)
    assert (
        plan.memory["backbone"]["cache"] == 2 * 2 * 2 * 2 * 584 * 16 * 2
    )  # layers, k and v, slots, heads...
    assert bundle.manifest.quality is not None
    assert bundle.manifest.quality["same_greedy"] > 0.9
    assert cache.stat().st_size > 0
    with pytest.raises(
        Exception, match="target: this runtime runs onnxruntime, torch on the host, got 'tensorrt-rtx'"
    ):
        load_target_model(bundle, max_nodes=8)


def test_an_operator_that_the_parser_refuses_is_named(tmp_path: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, ["K"])
    node = helper.make_node("Unique", ["x"], ["u", "y"], name="distinct")
    graph = helper.make_graph([node], "graph", [x], [y])
    path = tmp_path / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12), path)
    contract = GraphSpec((TensorSpec("x", (4,), "float32"),), ())
    with pytest.raises(ExportError) as caught:
        compiler.compile_engine(load_library("tensorrt-rtx"), path, contract, (), capabilities=("sm89",))
    assert "cannot take the node distinct (Unique): " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(
        ExportError, match=r"--target tensorrt: .*pip install -c constraints.txt -e '\.\[tensorrt\]'"
    ):
        load_library.__wrapped__("tensorrt")


def test_tensorrt_compiles_for_the_gpu_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library for data centres has no capabilities to name."""

    class Logger:
        ERROR = 1

        def __init__(self) -> None:
            pass

    module: Any = ModuleType("tensorrt")
    module.__version__, module.ILogger = "11.4.0", Logger
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    library = load_library.__wrapped__("tensorrt")
    assert (library.name, library.capabilities()) == ("tensorrt 11.4.0", ())
    check_capabilities(library, (), ("fp8",))
    with pytest.raises(ExportError, match="tensorrt compiles for the GPU it runs on, got --gpu"):
        check_capabilities(library, ("sm89",), ())


def test_defaults_for_one_stream_and_for_serving() -> None:
    model: Any = SimpleNamespace(max_position_embeddings=4096)
    alone, serving = (draft_plan(model, Options(max_batch=batch)) for batch in (1, 32))
    assert (alone.max_num_seqs, alone.max_nodes, alone.prefill_chunk) == (1, 64, 512)
    assert (serving.max_num_seqs, serving.max_nodes, serving.prefill_chunk) == (32, 16, 512)


def test_memory_is_the_sum_of_all_parts() -> None:
    memory = {"backbone": {"weights": GIB, "cache": 2 * GIB}, "drafter": {"weights": GIB // 2, "cache": 0}}
    check_memory(memory, None)
    check_memory(memory, 3.5)
    with pytest.raises(ExportError, match=r"need 3\.50 GiB, 2\.00 GiB of it for caches, got 3\.4 GiB"):
        check_memory(memory, 3.4)
