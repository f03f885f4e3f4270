"""From a bundle's files to a runner whose steps run on a device."""

import logging
from contextlib import suppress

from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError, DeviceMemoryError
from runtime.core.options import PROMPT_SIZES
from runtime.device.device import Device, Gpu, MakeEngine, OpenDevice, as_gpu
from runtime.device.kernels.driver import load_kernels
from runtime.device.kernels.graphs import with_kernels
from runtime.device.plan import plan_steps
from runtime.device.step import GraphStep
from runtime.load.engines import check_files, device_opener

LOGGER = logging.getLogger(__name__)
# If less than this share of a GPU's memory is free, the driver may lack memory for what it allocates during
# steps, and a warning is logged.
LEAST_FREE = 0.01


def open_device(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, MakeEngine]:
    """Open a device as the bundle's target does, with kernels in place of step-logic graphs on a GPU.

    Raises BundleError for a target that this runtime lacks.
    """
    opened, make = device_opener(bundle)(bundle, device, num_threads)
    gpu = as_gpu(opened)
    kernels = load_kernels(gpu) if gpu else None
    return opened, with_kernels(opened, kernels, bundle.manifest, make) if kernels else make


def load_graph_step(
    bundle: Bundle,
    method: str,
    *,
    device: str | None = None,
    max_num_seqs: int = 1,
    max_length: int,
    num_threads: int | None = None,
    opener: OpenDevice = open_device,
) -> GraphStep:
    """The graphs of a bundle's steps on a device.

    device: ``cpu``, or a GPU as ``cuda:0``; by default what the bundle's target runs on
    opener: opens the device and makes its engines
    Raises RequestError for a bundle without these graphs and for a device that its target does not run on,
    BundleError for a graph without a file, and DeviceError where the device lacks memory or cannot load the
    engines.
    """
    plan = plan_steps(bundle, method, max_num_seqs=max_num_seqs, max_length=max_length)
    opened, make = opener(bundle, device, num_threads)
    gpu = as_gpu(opened)
    try:
        check_files(bundle, plan.contracts)
        runner = GraphStep(
            opened,
            {name: make(name) for name in plan.contracts},
            plan,
            batch_sizes=batch_sizes(max_num_seqs) if gpu else (),
            prompt_sizes=prompt_sizes(plan.prefill_chunk_size) if gpu else (),
        )
        if gpu:
            _prepare_steps(runner, gpu)
        return runner
    except BaseException:
        # The memory is freed, so that the caller can try again with smaller limits. The error that is raised
        # is the first one, which is the cause of any other.
        with suppress(DeviceError):
            opened.close()
        raise


def _prepare_steps(runner: GraphStep, device: Gpu) -> None:
    """Run and capture all steps, and log the memory that they take.

    Only the library and the driver know how much memory execution contexts and captured steps take.
    Raises DeviceMemoryError, with the figures, if the GPU's memory does not suffice.
    """
    before, total = device.free_memory()
    advice = "a smaller max_num_seqs, or an export with fewer --step-nodes, prepares fewer steps"
    try:
        runner.warm_up()
    except DeviceError as error:
        if isinstance(error, DeviceMemoryError) or "out of memory" not in str(error):
            raise
        raise DeviceMemoryError(
            f"{error}; {before} of the GPU's {total} bytes were free before steps were prepared; {advice}"
        ) from error
    device.prepared()
    after = device.free_memory()[0]
    level = logging.WARNING if after < total * LEAST_FREE else logging.INFO
    LOGGER.log(
        level,
        "prepared steps take %d bytes of the GPU's memory, %d of %d are free; %s",
        *(before - after, after, total, advice),
    )


def prompt_sizes(chunk: int) -> list[int]:
    """Numbers of tokens of a prompt that passes of a GPU read, the largest of which is ``chunk``."""
    return [*(size for size in PROMPT_SIZES if size < chunk), chunk]


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which steps are captured: powers of two up to 8, then multiples of 8."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]
