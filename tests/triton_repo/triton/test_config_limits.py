"""Where models run: kinds of instances and limits, by what a bundle's engines were compiled for."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from runtime.core.bundle import Bundle, BundleManifest, EnginePlan
from runtime.core.errors import RequestError
from triton_repo.triton.config import choose_gpus, gpu_numbers, instance_device, max_num_seqs


@pytest.fixture
def on_cpu(tiny_bundle_dir: Path) -> BundleManifest:
    return Bundle.load(tiny_bundle_dir, verify=False).manifest


@pytest.fixture
def on_gpu(on_cpu: BundleManifest) -> BundleManifest:
    plan = EnginePlan(max_context=64, max_num_seqs=5, max_nodes=4, prefill_chunk=16)
    return replace(on_cpu, target="tensorrt-rtx", engine_plan=plan)


def instance(kind: str, number: int) -> dict[str, str]:
    """What Triton passes to ``initialize``."""
    return {"model_instance_kind": kind, "model_instance_device_id": str(number)}


def test_gpus(on_cpu: BundleManifest, on_gpu: BundleManifest) -> None:
    assert choose_gpus(on_gpu, None) == (0,)
    assert choose_gpus(on_gpu, gpu_numbers("1,3")) == (1, 3)
    assert choose_gpus(on_cpu, None) is None
    with pytest.raises(RequestError, match="--gpus: engines of the target onnxruntime run on the CPU"):
        choose_gpus(on_cpu, (0,))


def test_an_instance_opens_the_device_it_is_given(on_cpu: BundleManifest, on_gpu: BundleManifest) -> None:
    assert instance_device(on_gpu, instance("GPU", 2)) == "cuda:2"
    assert instance_device(on_cpu, instance("CPU", 0)) is None
    for manifest, given, needed in ((on_gpu, "CPU", "GPU"), (on_cpu, "GPU", "CPU")):
        message = f"target {manifest.target} need instances of KIND_{needed}, got KIND_{given}"
        with pytest.raises(RequestError, match=re.escape(message)):
            instance_device(manifest, instance(given, 0))


def test_the_engines_limits_are_the_defaults(on_cpu: BundleManifest, on_gpu: BundleManifest) -> None:
    assert [max_num_seqs(on_cpu, 0), max_num_seqs(on_gpu, 0), max_num_seqs(on_gpu, 3)] == [16, 5, 3]
