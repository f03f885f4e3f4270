"""From a bundle's files to a runner whose steps run on a device."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from runtime.core.bundle import DRAFT, Bundle, GraphSpec
from runtime.core.errors import DeviceError, DeviceMemoryError, RequestError
from runtime.core.options import MAX_PREFILL_CHUNK
from runtime.device.cuda_device import CudaDevice
from runtime.device.cuda_runtime import check_device_name, open_cuda_device
from runtime.device.device import Device, DeviceEngine
from runtime.device.graph_step import GraphStep
from runtime.device.host_device import HostDevice
from runtime.device.ort_graph import OrtGraph, check_cuda_provider
from runtime.device.step_buffers import StepBuffers
from runtime.device.step_plan import StepPlan, head_plan
from runtime.device.tensorrt import TensorRTEngine, import_tensorrt
from runtime.device.tensorrt_contexts import ContextFactory

LOGGER = logging.getLogger(__name__)
CPU = "cpu"
# The share of a GPU's memory below which the driver has nothing left for what it allocates while steps run.
LEAST_FREE = 0.01
# Caches are read in blocks of positions.
CAPACITY_MULTIPLE = 8


def load_graph_step(
    bundle: Bundle,
    method: str,
    *,
    device: str | None = None,
    max_num_seqs: int = 1,
    max_length: int,
    num_threads: int | None = None,
) -> GraphStep:
    """The graphs of a bundle's steps on a device.

    device: ``cpu``, or a GPU as ``cuda:0``; by default what the bundle's target runs on
    Raises RequestError for a bundle without these graphs and for a device that its target does not run on,
    and DeviceError where the device lacks memory or cannot load the engines.
    """
    manifest = bundle.manifest
    target, spec = manifest.target, manifest.drafter
    if spec and spec.drafts_in_verify_pass and (method == DRAFT or not manifest.step_nodes):
        raise RequestError(
            f"step: {bundle.path} holds streams of the verify pass, whose steps run on the host"
        )
    if not manifest.step_nodes:
        raise RequestError(
            f"step: {bundle.path} has no graphs of steps on a device; export it again with --step-nodes"
        )
    spec = spec if method == DRAFT else None
    nodes = manifest.step_nodes if spec else (0,)
    names = ["backbone", "accept", "accept_sampled", *(f"search_{count}" for count in nodes)]
    if spec:
        names += ["drafter", "prepare", "commit"]
        names += [name for name in ("expand",) if name in manifest.graphs]
    missing = [name for name in names if name not in manifest.graphs]
    if missing:
        raise RequestError(
            f"step: {bundle.path} has no graphs {', '.join(missing)}; export it again with --step-nodes, or "
            "decode with the method plain"
        )
    contracts = {name: manifest.graphs[name] for name in names}
    (path_length,) = {t.shape[1] for t in contracts["accept"].outputs if t.name == "path"}
    assert isinstance(path_length, int)
    plan = manifest.engine_plan
    if plan:
        for name, value, most in (
            ("max_num_seqs", max_num_seqs, plan.max_num_seqs),
            ("max_length", max_length, plan.max_context),
        ):
            if value > most:
                raise RequestError(f"{name}: the engines were compiled for at most {most}, got {value}")
    chunk = min(plan.prefill_chunk if plan else MAX_PREFILL_CHUNK, max_length)
    drafter = contracts.get("drafter")
    head = head_plan(spec, path_length=path_length, has_cache=_has_cache(drafter)) if spec else None
    steps = StepPlan(nodes, path_length, head)
    behind = max(nodes[-1] + 1, path_length)
    capacities = {
        "S": _capacity(contracts["backbone"]) or _rounded(max_length + behind),
        "drafter_S": _capacity(drafter) or _rounded(max_length + (head.behind if head else 0)),
    }
    opened, make = ENGINES[target](bundle, device, num_threads)
    try:
        runner = GraphStep(
            opened,
            {name: make(name) for name in names},
            StepBuffers(
                opened,
                contracts,
                capacities=capacities,
                max_num_seqs=max_num_seqs,
                step=steps.all_passes(),
                prompt=steps.prompt_passes(chunk),
            ),
            steps,
            max_num_seqs=max_num_seqs,
            prefill_chunk_size=chunk,
            batch_sizes=() if isinstance(opened, HostDevice) else batch_sizes(max_num_seqs),
            idle_length=max_length,
            # ONNX Runtime captures its passes by itself.
            capture=plan is not None,
        )
        if isinstance(opened, CudaDevice):
            _prepare_steps(runner, opened)
        return runner
    except BaseException:
        # Whoever tries again with smaller limits finds the memory free. What failed first is the cause.
        with suppress(DeviceError):
            opened.close()
        raise


def _prepare_steps(runner: GraphStep, device: CudaDevice) -> None:
    """Run and capture all steps. Raises DeviceMemoryError, with the figures, where the GPU's memory ends.

    Execution contexts and captured steps take memory of which only the library and the driver know.
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
    after = device.free_memory()[0]
    level = logging.WARNING if after < total * LEAST_FREE else logging.INFO
    LOGGER.log(
        level,
        "prepared steps take %d bytes of the GPU's memory, %d of %d are free; %s",
        *(before - after, after, total, advice),
    )


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which steps are captured: powers of two up to 8, then multiples of 8."""
    sizes = [1, 2, 4, *range(8, max_num_seqs, 8)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


def _has_cache(contract: GraphSpec | None) -> bool:
    return contract is not None and any(tensor.name.startswith("past_") for tensor in contract.inputs)


def _capacity(contract: GraphSpec | None) -> int | None:
    """Positions of a slot's cache where a contract fixes them."""
    shapes = [t.shape for t in contract.inputs if t.name.startswith("past_")] if contract else []
    return shapes[0][2] if shapes and isinstance(shapes[0][2], int) else None


def _rounded(positions: int) -> int:
    return -(-positions // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


MakeEngine = Callable[[str], DeviceEngine]


def _by_onnx_runtime(
    bundle: Bundle, device: str | None, num_threads: int | None
) -> tuple[Device, MakeEngine]:
    gpu = None
    if device not in (None, CPU):
        check_device_name(device)
        check_cuda_provider()
        gpu = open_cuda_device(device)

    def make(name: str) -> DeviceEngine:
        path, contract = bundle.path / f"{name}.onnx", bundle.manifest.graphs[name]
        return OrtGraph(path, contract, exact=name != "drafter", num_threads=num_threads, gpu=gpu)

    return gpu or HostDevice(), make


def _by_tensorrt(
    target: str, bundle: Bundle, device: str | None, num_threads: int | None
) -> tuple[Device, MakeEngine]:
    if device == CPU:
        raise RequestError(f"device: engines of {target} run on a GPU, such as cuda:0, got {CPU!r}")
    library = import_tensorrt(target)
    opened = open_cuda_device(device or "cuda:0")
    contexts = ContextFactory(library.trt, opened)
    plan = bundle.manifest.engine_plan
    assert plan is not None

    def make(name: str) -> DeviceEngine:
        content = (bundle.path / f"{name}.engine").read_bytes()
        contract, profiles = bundle.manifest.graphs[name], plan.profiles[name]
        try:
            return TensorRTEngine(
                *(library.trt, library.log, opened, content, contract, profiles),
                name=name,
                contexts=contexts,
            )
        except DeviceError as error:
            built_for = ", ".join(plan.capabilities) or "the GPU that compiled it"
            raise DeviceError(f"{error}; it was compiled by {plan.library} for {built_for}") from error

    return opened, make


# By ``BundleManifest.target``: opens the device, and makes its engines by graph.
ENGINES: dict[str, Callable[[Bundle, str | None, int | None], tuple[Device, MakeEngine]]] = {
    "onnxruntime": _by_onnx_runtime,
    "tensorrt-rtx": partial(_by_tensorrt, "tensorrt-rtx"),
    "tensorrt": partial(_by_tensorrt, "tensorrt"),
}
