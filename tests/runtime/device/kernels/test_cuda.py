"""Whole steps in which kernels take the place of the step-logic graphs.

On a stand-in for CUDA whose memory and kernels are the host's, and on the host as a device.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.verify.host_kernels import HostKernels
from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from runtime.device.cuda import CudaDevice
from runtime.device.kernels import driver as kernels_driver
from runtime.device.kernels.arguments import AcceptArguments, KernelLaunch, PrepareArguments
from runtime.device.kernels.driver import read_image
from runtime.device.kernels.graphs import KernelEngine, with_kernels
from runtime.device.ort import open_ort
from runtime.device.step import GraphStep
from tests.batch_runs import decode_together, mixed_requests
from tests.benchmarks.gpu.test_gate import run as run_gate
from tests.conftest import PROMPTS
from tests.device_of_memory import FakeCudart, FakeDriver
from tests.engine_bundles import device_of_memory

PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)
# A block's threads on the host, where many of them only take longer.
THREADS = 32


@pytest.fixture
def cudart(
    monkeypatch: pytest.MonkeyPatch, tiny_engine_bundle: Path, host_kernels: HostKernels
) -> FakeCudart:
    monkeypatch.setattr("runtime.load.device.with_kernels", partial(with_kernels, threads=THREADS))
    return device_of_memory(monkeypatch, tiny_engine_bundle, kernels=host_kernels)


def driver_of() -> FakeDriver:
    driver = kernels_driver.load_driver()
    assert isinstance(driver, FakeDriver)
    return driver


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"max_length": 200, "num_threads": 1, "num_nodes": 8, **options}
    )


def check_batches(bundle: Path, device: SpeculativeDecoder) -> None:
    """Requests of every kind join and leave, with another size of tree in every step."""
    host = load(bundle, step="host")
    prompts = [host.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)]
    requests = mixed_requests(prompts)
    requests[3][1]["sampling"] = PENALISED
    expected = [
        [token for chunk in host.stream(prompt, **options) for token in chunk.token_ids]
        for prompt, options in requests
    ]
    assert decode_together(device, requests, np.random.default_rng(1)) == expected


@pytest.mark.parametrize("name", ["ctc-mlp", "hydra", "eagle"])
def test_batches_on_the_host(
    name: str,
    step_bundle_of: Callable[[str], Path],
    host_kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every engine but the target model's, the head's and ``expand`` is one of kernels."""
    replaced = set()

    def opener(bundle: Bundle, device: str | None, num_threads: int | None) -> Any:
        opened, make = open_ort(bundle, device, num_threads)
        make = with_kernels(opened, host_kernels, bundle.manifest, make, threads=THREADS)

        def made(graph: str) -> Any:
            engine = make(graph)
            if isinstance(engine, KernelEngine):
                replaced.add(graph)
            return engine

        return opened, made

    monkeypatch.setattr("runtime.load.device.device_opener", lambda bundle: opener)
    bundle = step_bundle_of(name)
    check_batches(bundle, load(bundle, step="graph", max_num_seqs=3))
    graphs = Bundle.load(bundle).manifest.graphs.keys()
    assert graphs - replaced == {"backbone", "drafter", *({"expand"} & graphs)}


def test_batches_on_a_gpu(tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart) -> None:
    device = load(tiny_engine_bundle, max_num_seqs=3)
    check_batches(tiny_step_bundle, device)
    runner = device.batch.runner
    assert isinstance(runner, GraphStep)
    runner.close()
    assert cudart.leftovers() == []
    assert driver_of().modules == {}
    assert driver_of().num_retained == 0


@pytest.mark.parametrize(
    ("sampling", "kernels"),
    [
        (SamplingParams(), ["prepare", "search", "accept", "commit"]),
        (SamplingParams(temperature=0.8, seed=3), ["prepare", "search", "draw", "accept", "commit"]),
    ],
)
def test_a_step_is_one_launch_with_a_kernel_for_a_stage(
    sampling: SamplingParams,
    kernels: list[str],
    tiny_engine_bundle: Path,
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = load(tiny_engine_bundle)
    steps = decoder.stream(
        [5, 6, 7], budget=FixedBudget(8), max_new_tokens=60, stop_token_ids=(), sampling=sampling
    )
    next(steps)  # the prompt
    launched = []
    really = cudart.cudaGraphLaunch

    def launch(executable: int, stream: int) -> tuple[int]:
        launched.append([work.kernel for work in cudart.executables[executable] if work.kernel])
        return really(executable, stream)

    monkeypatch.setattr(cudart, "cudaGraphLaunch", launch)
    next(steps)
    assert launched == [kernels]


def test_a_driver_that_refuses_the_module_runs_graphs(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, cudart: FakeCudart, caplog: pytest.LogCaptureFixture
) -> None:
    driver_of().refused["cuModuleLoadData"] = FakeDriver.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    with caplog.at_level(logging.WARNING):
        device = load(tiny_engine_bundle)
    assert "cuModuleLoadData: error 222 of the driver" in caplog.text
    assert all(work.kernel is None for works in cudart.executables.values() for work in works)
    expected = [
        chunk.token_ids for chunk in load(tiny_step_bundle, step="host").stream([5], max_new_tokens=9)
    ]
    found = [chunk.token_ids for chunk in device.stream([5], max_new_tokens=9)]
    assert [*np.concatenate(found)] == [*np.concatenate(expected)]


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ("sm86", 86),
        ("sm87", 86),
        ("sm90", 90),
        ("sm103", 100),
        ("sm121", 120),
        ("sm75", None),
        ("sm110", None),
    ],
)
def test_the_file_for_a_gpu(capability: str, target: int | None) -> None:
    image = read_image(capability)
    if target is None:
        assert b".target sm_75" in image
    else:
        # The lowest or, since CUDA 13, the second byte of the ELF header's flags says for which GPU it is.
        assert image[:4] == b"\x7fELF"
        assert target in (image[48], image[49])


def test_a_launch_that_the_driver_refuses(cudart: FakeCudart) -> None:
    device = CudaDevice(cudart)
    kernels = kernels_driver.load_kernels(device)
    assert kernels
    launch = KernelLaunch("accept", (1, 1, 1), THREADS, kernels.max_shared_bytes + 1, AcceptArguments())
    with pytest.raises(DeviceError, match="accept: cuLaunchKernel: error 1 of the driver"):
        kernels.launch(launch)
    with pytest.raises(DeviceError, match="unusable since accept"):
        device.allocate((1,), "bool")


def test_a_thread_that_has_used_no_gpu(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch selects the first GPU without a call of CUDA, so the driver has no context there yet."""
    device = CudaDevice(cudart)
    monkeypatch.setattr(device, "select", lambda: None)
    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(kernels_driver.load_kernels, device).result()
    assert kernels
    path, counts = (device.allocate((1, 2), "int64") for _ in range(2))
    arguments = PrepareArguments(lengths=path.address, counts=counts.address)
    kernels.launch(KernelLaunch("prepare", (1, 1, 1), THREADS, 0, arguments))


def test_the_gate_compares_kernels(
    tiny_step_bundle: Path,
    tiny_engine_bundle: Path,
    cudart: FakeCudart,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A kernel that does nothing is named by the graph that it stands for."""
    launch = HostKernels.launch

    def forgetful(kernels: HostKernels, each: KernelLaunch) -> None:
        if each.kernel != "commit":
            launch(kernels, each)

    reference = ["--reference", str(tiny_step_bundle)]
    assert run_gate(tiny_engine_bundle, tmp_path / "right", *reference)[1]["status"] == "passed"
    monkeypatch.setattr(HostKernels, "launch", forgetful)
    _, gate = run_gate(tiny_engine_bundle, tmp_path / "wrong", *reference)
    wrong = [row["graph"] for row in gate["engines"]["rows"] if row["problems"]]
    assert wrong == ["commit"]
