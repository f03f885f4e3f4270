"""A decoder whose steps run on a device: the memory it gives back, and the limits of its engines."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from runtime.core.bundle import Bundle, GraphSpec, TensorSpec
from runtime.core.errors import DeviceError, RequestError
from runtime.decoder import SpeculativeDecoder
from runtime.device.cuda import CudaDevice
from runtime.device.device import Device, MakeEngine
from runtime.device.ort import OrtGraph
from runtime.device.plan import StepPlan
from runtime.device.step import GraphStep
from runtime.load.device import batch_sizes, open_device
from tests.device_of_memory import FakeCudart

open_decoder = partial(SpeculativeDecoder.from_bundle, num_threads=1, step="graph")


class KeepingOpener:
    """Opens devices as the product does, and keeps them."""

    def __init__(self) -> None:
        self.devices: list[Any] = []

    def __call__(
        self, bundle: Bundle, device: str | None, num_threads: int | None
    ) -> tuple[Device, MakeEngine]:
        found, make = open_device(bundle, device, num_threads)
        self.devices.append(found)
        return found, make


def test_a_closed_decoder_gives_its_memory_back(tiny_step_bundle: Path) -> None:
    opener = KeepingOpener()
    decoder = open_decoder(tiny_step_bundle, opener=opener)
    (device,) = opener.devices
    assert device._blocks
    decoder.close()
    decoder.close()
    assert device._blocks == []
    with pytest.raises(DeviceError, match="the engines are closed"):
        list(decoder.stream([5], max_new_tokens=4))
    SpeculativeDecoder.from_bundle(tiny_step_bundle, num_threads=1).close()


@pytest.mark.parametrize("method", ["__init__", "bind"])
def test_a_decoder_that_cannot_be_loaded_gives_its_memory_back(
    tiny_step_bundle: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise DeviceError("cudaMalloc: out of memory")

    monkeypatch.setattr(OrtGraph, method, fail)
    opener = KeepingOpener()
    with pytest.raises(DeviceError, match="out of memory"):
        open_decoder(tiny_step_bundle, opener=opener)
    (device,) = opener.devices
    assert device._blocks == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_s_memory_is_freed(fails: bool) -> None:
    """Even where the last work failed, which is told."""
    cudart = FakeCudart()
    device = CudaDevice(cudart)
    contract = GraphSpec(tuple(TensorSpec(name, ("B", 1), "int64") for name in ("lengths", "anchor_ids")), ())
    contracts = dict.fromkeys(("search_0", "backbone", "accept", "accept_sampled"), contract)
    plan = StepPlan(
        contracts,
        nodes=(0,),
        path_length=1,
        max_num_seqs=1,
        max_length=1,
        prefill_chunk_size=1,
        capacity=8,
        room=7,
        lengths=(1,),
    )
    runner = GraphStep(device, {"backbone": object()}, plan)  # type: ignore[dict-item]
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
    assert batch_sizes(max_num_seqs) == sizes


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
