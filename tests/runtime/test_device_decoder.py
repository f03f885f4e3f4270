"""A decoder whose steps run on a device: the memory it gives back, and the limits of its engines."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError, RequestError
from runtime.decoder import SpeculativeDecoder
from runtime.device import load_device
from runtime.device.cuda_device import CudaDevice
from runtime.device.device import Device
from runtime.device.graph_step import GraphStep
from runtime.device.ort_graph import OrtGraph
from runtime.device.step_buffers import StepBuffers
from runtime.device.step_plan import StepPlan
from tests.device_of_memory import FakeCudart

open_decoder = partial(SpeculativeDecoder.from_bundle, num_threads=1, step="graph")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that are opened for bundles of ONNX Runtime."""
    devices: list[Any] = []
    really_open = load_device.ENGINES["onnxruntime"]

    def open_device(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, Any]:
        found, make = really_open(bundle, device, num_threads)
        devices.append(found)
        return found, make

    monkeypatch.setitem(load_device.ENGINES, "onnxruntime", open_device)
    return devices


def test_a_closed_decoder_gives_its_memory_back(tiny_step_bundle: Path, opened: list[Any]) -> None:
    decoder = open_decoder(tiny_step_bundle)
    (device,) = opened
    assert device._blocks
    decoder.close()
    decoder.close()
    assert device._blocks == []
    with pytest.raises(DeviceError, match="the engines are closed"):
        list(decoder.stream([5], max_new_tokens=4))
    SpeculativeDecoder.from_bundle(tiny_step_bundle, num_threads=1).close()


@pytest.mark.parametrize("method", ["__init__", "bind"])
def test_a_decoder_that_cannot_be_loaded_gives_its_memory_back(
    tiny_step_bundle: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise DeviceError("cudaMalloc: out of memory")

    monkeypatch.setattr(OrtGraph, method, fail)
    with pytest.raises(DeviceError, match="out of memory"):
        open_decoder(tiny_step_bundle)
    (device,) = opened
    assert device._blocks == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_s_memory_is_freed(fails: bool) -> None:
    """Even where the last work failed, which is told."""
    cudart = FakeCudart()
    device = CudaDevice(cudart)
    buffers = StepBuffers(device, {}, capacities={}, max_num_seqs=1, step=[], prompt=[])
    buffers.arrays |= {name: device.allocate((1, 1), "int64") for name in ("lengths", "anchor_ids")}
    runner = GraphStep(
        device,
        {"backbone": object()},  # type: ignore[dict-item]
        buffers,
        StepPlan((0,), 1, None),
        max_num_seqs=1,
        prefill_chunk_size=1,
    )
    assert cudart.memory.live()
    if fails:
        cudart.failures["cudaStreamSynchronize"] = [600]
        with pytest.raises(DeviceError, match="cudaStreamSynchronize: device not ready"):
            runner.close()
    runner.close()
    assert cudart.memory.live() == []
    with pytest.raises(DeviceError, match="the engines are closed"):
        runner.step([], 0)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (16, [1, 2, 4, 8, 16]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_batch_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert load_device.batch_sizes(max_num_seqs) == sizes


def test_the_engines_limits(tiny_step_bundle: Path, tmp_path: Path) -> None:
    """The longest text is what they were compiled for, where that is less than the model's context."""
    directory = Path(shutil.copytree(tiny_step_bundle, tmp_path / "compiled"))
    path = directory / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["engine_plan"] = {"max_context": 64, "max_num_seqs": 2, "max_nodes": 4, "prefill_chunk": 16}
    manifest["engine_plan"] |= {"library": "", "capabilities": [], "profiles": {}, "memory": {}}
    path.write_text(json.dumps(manifest))
    make: Callable[..., SpeculativeDecoder] = partial(open_decoder, directory)
    decoder = make(max_num_seqs=2)
    assert (decoder.max_length, decoder.batch.runner.prefill_chunk_size) == (64, 16)
    assert make(max_length=32).max_length == 32
    for limits, message in (
        ({"max_length": 65}, "max_length: the engines were compiled for at most 64, got 65"),
        ({"max_num_seqs": 3}, "max_num_seqs: the engines were compiled for at most 2, got 3"),
    ):
        with pytest.raises(RequestError, match=message):
            make(**limits)
