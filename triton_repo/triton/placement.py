"""Where a bundle's models run, and for how many requests: its target decides."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.core.bundle import BundleManifest
from runtime.core.errors import RequestError

DEFAULT_MAX_NUM_SEQS = 16
# The first GPU.
DEFAULT_GPUS = (0,)


def gpu_numbers(text: str) -> tuple[int, ...]:
    """An argument type: numbers of GPUs, such as ``0,1``."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() for part in parts) or len(set(map(int, parts))) < len(parts):
        raise argparse.ArgumentTypeError(f"must be numbers of different GPUs, such as 0,1, got {text!r}")
    return tuple(map(int, parts))


def runs_on_gpu(manifest: BundleManifest) -> bool:
    """Only engines that are compiled for a GPU have a plan."""
    return manifest.engine_plan is not None


def choose_gpus(manifest: BundleManifest, gpus: Sequence[int] | None) -> Sequence[int] | None:
    """The GPUs of a bundle's models; None where they run on the CPU.

    gpus: those that were asked for
    Raises RequestError if GPUs were asked for and the engines cannot use them.
    """
    if runs_on_gpu(manifest):
        return gpus or DEFAULT_GPUS
    if gpus:
        raise RequestError(f"--gpus: engines of the target {manifest.target} run on the CPU")
    return None


def instance_device(manifest: BundleManifest, args: Mapping[str, str]) -> str | None:
    """The runtime's name of the device that Triton gives an instance; None for the CPU.

    args: those of the model's ``initialize``
    Raises RequestError where the configuration's kind of instance is not the one that the engines need.
    """
    kind = args["model_instance_kind"]
    needed = "GPU" if runs_on_gpu(manifest) else "CPU"
    if kind != needed:
        raise RequestError(
            f"instance_group: engines of the target {manifest.target} need instances of KIND_{needed}, "
            f"got KIND_{kind}"
        )
    return f"cuda:{args['model_instance_device_id']}" if kind == "GPU" else None


def max_num_seqs(manifest: BundleManifest, wanted: int) -> int:
    """Requests that decode at a time: as many as wanted, or for 0 as the engines were compiled for."""
    plan = manifest.engine_plan
    return wanted or (plan.max_num_seqs if plan else DEFAULT_MAX_NUM_SEQS)


def instance_group(gpus: Sequence[int] | None, num_instances: int) -> dict[str, Any]:
    """The entry of ``config.pbtxt``. Triton starts ``num_instances`` on each of the GPUs."""
    if gpus is None:
        return {"kind": "KIND_CPU", "count": num_instances}
    return {"kind": "KIND_GPU", "count": num_instances, "gpus": list(gpus)}
