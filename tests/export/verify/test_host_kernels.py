"""Running kernels on the host finds races, threads that do not meet, and writes behind shared memory."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments.step_kernels import batch_of
from export.step.contracts import commit_contract
from export.verify.comparison import Tensors
from export.verify.host_kernels import (
    ASCENDING,
    DESCENDING,
    HostKernels,
    KernelFault,
    compiler,
    run_on_host,
)
from runtime.core.bundle import GraphSpec, ModelSpec, TensorSpec
from runtime.device.kernels.arguments import KernelLaunch, Launcher
from runtime.device.kernels.driver import SOURCE
from runtime.device.kernels.graphs import KernelEngine, graph_kernels

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed")

MODEL = ModelSpec("m", "LlamaForCausalLM", 50, 16, 2, 2, 8, 64, 16, (0,), None, "", "")
TARGET = GraphSpec(
    *(
        tuple(TensorSpec(f"{side}_{kind}_0", ("B", 2, "S", 8), "float16") for kind in ("key", "value"))
        for side in ("past", "present")
    )
)
COMMIT = commit_contract(TARGET, MODEL, 5)


def changed(tmp_path: Path, file: str, old: str, new: str) -> HostKernels:
    """The kernels with one place of their source changed."""
    shutil.copytree(SOURCE.parent, tmp_path / "source")
    path = tmp_path / "source" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return HostKernels(tmp_path / "source" / SOURCE.name)


def committed(launcher: Launcher) -> list[Tensors]:
    kernels = graph_kernels("commit", COMMIT, None)
    assert kernels
    batches = [batch_of(COMMIT, 4, seed) for seed in range(3)]
    return [
        run_on_host(lambda device: KernelEngine(device, launcher, kernels), COMMIT, each) for each in batches
    ]


def equal(first: list[Tensors], second: list[Tensors]) -> bool:
    return all(
        np.array_equal(one[name], other[name])
        for one, other in zip(first, second, strict=True)
        for name in one
    )


@pytest.mark.parametrize("order", [DESCENDING, 2, 3])
def test_no_order_changes_a_result(order: int, host_kernels: HostKernels) -> None:
    host_kernels.order = ASCENDING
    expected = committed(host_kernels)
    host_kernels.order = order
    assert equal(committed(host_kernels), expected)


def test_a_missing_barrier_shows_in_another_order(tmp_path: Path) -> None:
    """A row is overwritten before it is read, unless the threads happen to come in ascending order."""
    kernels = changed(
        tmp_path,
        "commit.cu",
        "    // A row may be written where another one was read.\n    __syncthreads();\n",
        "",
    )
    found = []
    for order in (ASCENDING, DESCENDING, 2):
        kernels.order = order
        found.append(committed(kernels))
    assert not equal(found[0], found[1])
    assert not equal(found[0], found[2])


def test_a_barrier_that_some_threads_do_not_reach(tmp_path: Path) -> None:
    kernels = changed(
        tmp_path,
        "commit.cu",
        "    // A row may be written where another one was read.\n    __syncthreads();\n",
        "    if (threadIdx.x < 4)\n        __syncthreads();\n",
    )
    with pytest.raises(KernelFault, match="commit: some of its threads end while others wait"):
        committed(kernels)


def test_a_launch_with_too_little_shared_memory(host_kernels: HostKernels) -> None:
    class Narrow:
        max_shared_bytes = host_kernels.max_shared_bytes

        def launch(self, launch: KernelLaunch) -> None:
            host_kernels.launch(replace(launch, shared_bytes=launch.shared_bytes - 8))

    with pytest.raises(KernelFault, match="commit: it writes behind its shared memory"):
        committed(Narrow())
