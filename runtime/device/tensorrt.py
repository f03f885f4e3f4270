"""Compiled engines of TensorRT, or of TensorRT for RTX, and their execution contexts on a ``CudaDevice``."""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from runtime.core.bundle import Bundle, EngineProfile, GraphSpec
from runtime.core.errors import BundleError, DeviceError, RequestError
from runtime.device.cuda import CudaDevice, open_cuda_device
from runtime.device.device import ALIGNMENT, CPU, Device, DeviceArray, DeviceEngine, Launch, MakeEngine
from runtime.device.kernel_file import KernelFile, kernel_file

LOGGER = logging.getLogger(__name__)
# Of a graph's file, after the graph's name.
SUFFIX = ".engine"
# Before the numbers of outputs that hold queries of attention, which nobody reads (``export.trt.compiler``).
ATTENTION_QUERY = "attention_query_"
# They are in half precision.
QUERY_BYTES = 2
# The modules that hold each library; the first that can be imported is taken.
MODULES = {"tensorrt-rtx": ("tensorrt_rtx_bindings", "tensorrt_rtx"), "tensorrt": ("tensorrt",)}


@dataclass(frozen=True)
class TensorRTLibrary:
    """trt: the library's module; log: the logger of this process, as the library ignores a second one."""

    trt: Any
    log: Any


def import_tensorrt_module(target: str) -> Any:
    """The module of a target's library. Raises BundleError, which names the extra to install."""
    for name in MODULES[target]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
        except OSError as error:  # a shared library of it is missing
            raise BundleError(f"target {target}: {name} cannot be loaded: {error}") from error
    raise BundleError(
        f"target {target}: its library is not installed; pip install -c constraints.txt -e '.[{target}]' "
        "brings it"
    )


@functools.cache
def import_tensorrt(target: str) -> TensorRTLibrary:
    """The library that runs a target's engines, with a logger that writes warnings to Python's log."""
    trt = import_tensorrt_module(target)

    class Log(trt.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.WARNING:
                LOGGER.warning(message)

    return TensorRTLibrary(trt, Log())


class Context:
    """An execution context, and the profile it was switched to.

    needed: objects that the library needs as long as the context lives
    """

    def __init__(self, library: Any, *needed: Any):
        self.library = library
        self.profile: int | None = None
        self._needed = needed


class ContextFactory:
    """Makes the execution contexts of one device's engines.

    trt: the library's module

    All contexts share their scratch memory, because their passes run one after another on one stream. It is
    allocated with the first context, in the size that the largest engine added so far needs. It never moves,
    because contexts and captured steps keep its address.

    TensorRT for RTX compiles kernels while it runs. The contexts share a cache of compiled kernels, since
    most contexts differ only in their shapes. A context gets kernels for its own shapes before its first
    pass. Otherwise the library would begin with general kernels and compile others in the background, and a
    step that is captured in the meantime would keep the general ones, if it could be captured at all.

    kept: the file with the kernels that an earlier process has compiled; None to compile all of them
    """

    def __init__(self, trt: Any, device: CudaDevice, kept: KernelFile | None = None):
        self._trt = trt
        self._device = device
        self._kept = kept
        self._cache: Any = None
        self._scratch_size = 0
        self._scratch: DeviceArray | None = None
        self._queries: DeviceArray | None = None

    def add(self, engine: Any) -> None:
        """Announce an engine. All engines should be added before the first context is made."""
        self._scratch_size = max(self._scratch_size, int(engine.device_memory_size_v2))

    def make(self, engine: Any, name: str) -> Context:
        """A context of an engine that was added; ``name`` is what messages call the engine."""
        self._device.select()
        managed = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        settings = managed
        # TensorRT has no such strategies.
        if hasattr(self._trt, "DynamicShapesKernelSpecializationStrategy"):
            settings = self._settings(engine, managed, name)
        library = engine.create_execution_context(settings)
        if library is None:
            memory = self._device.describe_memory()
            raise DeviceError(f"{name}: the library cannot create an execution context; {memory}")
        if self._scratch is None or self._scratch.nbytes < self._scratch_size:
            # Contexts made before a larger engine was added keep the smaller memory.
            self._scratch = self._device.allocate((self._scratch_size,), "bool")
        library.set_device_memory(self._scratch.address, self._scratch.nbytes)
        return Context(library, settings, self._cache)

    def queries(self, nbytes: int) -> DeviceArray:
        """Memory of so many bytes for the query of one attention.

        All attentions of all passes share it: the one that a query is for is its only reader, and has read it
        before the next layer computes its own. Contexts that were bound before a larger one keep theirs.
        """
        if self._queries is None or self._queries.nbytes < nbytes:
            self._queries = self._device.allocate((nbytes,), "bool")
        return self._queries

    def keep_kernels(self) -> None:
        """Write the compiled kernels to their file. TensorRT compiles none when it runs."""
        if self._kept and self._cache is not None:
            self._kept.save(self._cache)

    def _settings(self, engine: Any, managed: Any, name: str) -> Any:
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(managed)
        strategies = self._trt.DynamicShapesKernelSpecializationStrategy
        settings.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        if self._cache is None:
            self._cache = settings.create_runtime_cache()
            if self._kept:
                self._kept.load(self._cache)
        if not settings.set_runtime_cache(self._cache):
            raise DeviceError(f"{name}: the library refuses its own cache of compiled kernels")
        return settings


class TensorRTEngine:
    """Passes of one engine.

    trt, log: as of ``TensorRTLibrary``
    plan: the compiled engine
    profiles: the shapes it was compiled for, in the plan's order
    name: what messages call it
    contexts: makes the execution contexts of all engines of the device; by default of this one alone

    Raises DeviceError for a plan that the library or this GPU cannot load, and for one whose tensors or whose
    update of the cache in place are not those of the contract.
    """

    def __init__(
        self,
        trt: Any,
        log: Any,
        device: CudaDevice,
        plan: bytes | memoryview,
        contract: GraphSpec,
        profiles: Sequence[EngineProfile],
        *,
        name: str = "engine",
        contexts: ContextFactory | None = None,
    ):
        self._trt = trt
        self._device = device
        self._contract = contract
        self._profiles = profiles
        self._name = name
        self._contexts = contexts or ContextFactory(trt, device)
        # Whether the log says that passes of this engine cannot be captured.
        self._has_warned = False
        device.select()
        # An engine needs the runtime that loaded it.
        self._runtime = trt.Runtime(log)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            if device.free_memory()[0] < len(plan):
                raise DeviceError(
                    f"{name}: out of memory: the engine's weights need about {len(plan)} bytes, "
                    f"{device.describe_memory()}; fewer instances on this GPU, or an export with a lower "
                    "--precision, need less"
                )
            raise DeviceError(
                f"{name}: {trt.__name__} {trt.__version__} cannot load this plan; it is damaged, or was "
                "compiled by another version or for GPUs of another compute capability"
            )
        self._check_tensors()
        self._contexts.add(self._engine)
        self._spare: Context | None = None

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        """Passes in an execution context of their own, whose shapes and addresses stay as they are.

        Before the result is captured, it must be called once, with ``synchronize`` after it: a library may
        allocate memory at the first pass in a shape, which cannot be recorded.
        Raises DeviceError for shapes that no profile accepts, and ValueError for arrays that the contract
        does not name, of another type or at an address that is no multiple of 256.
        """
        context = self._contexts.make(self._engine, self._name)
        self._set(context, arrays)
        return _Pass(partial(self._execute, context), partial(self._can_be_captured, context))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        if self._spare is None:
            self._spare = self._contexts.make(self._engine, self._name)
        self._set(self._spare, arrays)
        self._execute(self._spare)

    def _check_tensors(self) -> None:
        engine, inputs = self._engine, self._trt.TensorIOMode.INPUT
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self._queries = [name for name in names if name.startswith(ATTENTION_QUERY)]
        found = {name: engine.get_tensor_mode(name) == inputs for name in names if name not in self._queries}
        expected = dict.fromkeys((t.name for t in self._contract.inputs), True)
        expected |= dict.fromkeys((t.name for t in self._contract.outputs), False)
        if found != expected:
            differing = sorted(name for name, _ in found.items() ^ expected.items())
            raise DeviceError(
                f"{self._name}: the plan's tensors are not those of the bundle: {', '.join(differing)}"
            )
        # TensorRT before 10.15 cannot tell which outputs are aliases.
        if not hasattr(engine, "get_aliased_input_tensor"):
            return
        for present, past in self._caches().items():
            alias = engine.get_aliased_input_tensor(present)
            if alias != past:
                raise DeviceError(
                    f"{self._name}: {present} must be updated in place of {past}, the plan has {alias}"
                )

    def _caches(self) -> dict[str, str]:
        """The outputs of the cache, each with the input that it updates."""
        names = (tensor.name for tensor in self._contract.outputs)
        return {name: name.replace("present_", "past_", 1) for name in names if name.startswith("present_")}

    def _set(self, context: Context, arrays: Mapping[str, DeviceArray]) -> None:
        self._device.select()
        profile = self._profile(self._sizes(arrays))
        library = context.library
        if profile != context.profile:
            if not library.set_optimization_profile_async(profile, self._device.stream):
                raise DeviceError(f"{self._name}: the plan refuses its optimisation profile {profile}")
            context.profile = profile
        for tensor in self._contract.inputs:
            if not library.set_input_shape(tensor.name, arrays[tensor.name].shape):
                raise DeviceError(
                    f"{self._name}: the plan refuses {tensor.name} of {arrays[tensor.name].shape}"
                )
        for name, array in arrays.items():
            if not library.set_tensor_address(name, array.address):
                raise DeviceError(f"{self._name}: the plan refuses the address of {name}")
        for name in self._queries:
            memory = self._contexts.queries(prod(library.get_tensor_shape(name)) * QUERY_BYTES)
            if not library.set_tensor_address(name, memory.address):
                raise DeviceError(f"{self._name}: the plan refuses the address of {name}")

    def _execute(self, context: Context) -> None:
        self._device.select()
        if not context.library.execute_async_v3(self._device.stream):
            raise self._device.fail(f"{self._name}: execute_async_v3 refused a pass")

    def _can_be_captured(self, context: Context) -> bool:
        """Whether the library can record the next pass. TensorRT, unlike that for RTX, always can."""
        self._device.select()
        ask = getattr(context.library, "is_stream_capturable", None)
        if ask is None or ask(self._device.stream):
            return True
        if not self._has_warned:
            self._has_warned = True
            LOGGER.warning(
                "%s: the library cannot record its passes; steps with it are launched pass by pass, slower",
                self._name,
            )
        return False

    def _sizes(self, arrays: Mapping[str, DeviceArray]) -> dict[str, int]:
        """The sizes of the open axes, by name."""
        tensors = (*self._contract.inputs, *self._contract.outputs)
        if arrays.keys() != {tensor.name for tensor in tensors}:
            raise ValueError(f"{self._name}: arrays must be given for {[t.name for t in tensors]}")
        sizes: dict[str, int] = {}
        for tensor in tensors:
            array = arrays[tensor.name]
            if array.dtype != tensor.dtype:
                raise ValueError(f"{self._name}: {tensor.name} must be of {tensor.dtype}, got {array.dtype}")
            if array.address % ALIGNMENT:
                raise ValueError(f"{self._name}: {tensor.name} must begin at a multiple of {ALIGNMENT} bytes")
            for axis, size in zip(tensor.shape, array.shape, strict=False):
                if isinstance(axis, str):
                    sizes.setdefault(axis, size)
            expected = tuple(axis if isinstance(axis, int) else sizes.get(axis) for axis in tensor.shape)
            if array.shape != expected:
                raise DeviceError(
                    f"{self._name}: {tensor.name} must have the shape {expected}, got {array.shape}"
                )
        for present, past in self._caches().items():
            if arrays[present].address != arrays[past].address:
                raise ValueError(f"{self._name}: {present} must have the address of {past}")
        return sizes

    def _profile(self, sizes: dict[str, int]) -> int:
        """The first profile that accepts these sizes."""
        for index, profile in enumerate(self._profiles):
            # A profile leaves out axes that only outputs have, since these follow from the others.
            if all(low <= sizes[axis] <= high for axis, (low, _, high) in profile.items()):
                return index
        raise DeviceError(f"{self._name}: no optimisation profile takes {sizes}")


@dataclass(frozen=True)
class _Pass:
    """A prepared pass. can_be_captured: what ``runtime.device.device.can_be_captured`` calls"""

    launch: Launch
    can_be_captured: Callable[[], bool]

    def __call__(self) -> None:
        self.launch()


def open_tensorrt(
    target: str, bundle: Bundle, device: str | None, num_threads: int | None
) -> tuple[Device, MakeEngine]:
    """Open a GPU for a bundle of either library. As ``runtime.device.device.OpenDevice``."""
    if device == CPU:
        raise RequestError(f"device: engines of {target} run on a GPU, such as cuda:0, got {CPU!r}")
    library = import_tensorrt(target)
    opened = open_cuda_device(device or "cuda:0")
    contexts = ContextFactory(library.trt, opened, kernel_file(library.trt, opened))
    opened.when_prepared(contexts.keep_kernels)
    plan = bundle.manifest.engine_plan
    assert plan is not None

    def make(name: str) -> DeviceEngine:
        content = (bundle.path / f"{name}{SUFFIX}").read_bytes()
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
