"""A compiled engine of TensorRT, or of TensorRT for RTX, on a ``CudaDevice``."""

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.core.bundle import EngineProfile, GraphSpec
from runtime.core.errors import BundleError, DeviceError
from runtime.device.cuda_device import CudaDevice
from runtime.device.device import DeviceArray
from runtime.device.tensorrt_contexts import Context, ContextFactory

LOGGER = logging.getLogger(__name__)
# The libraries demand it of the address of every tensor; memory that is allocated has it.
ALIGNMENT = 256


# The modules that hold each library; the first that can be imported is taken.
MODULES = {"tensorrt-rtx": ("tensorrt_rtx_bindings", "tensorrt_rtx"), "tensorrt": ("tensorrt",)}


@dataclass(frozen=True)
class TensorRTLibrary:
    """trt: the library's module; log: the logger of this process, since the library ignores a second one."""

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


class TensorRTEngine:
    """Passes of one engine.

    trt: the library's module, ``tensorrt_rtx_bindings`` or ``tensorrt``
    log: its logger; one serves the whole process, because the library ignores a second one
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
        # Of this kind one warning is enough.
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

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        """Passes in an execution context of their own, whose shapes and addresses stay as they are.

        The result must be called once, and ``synchronize`` too, before a call of it is captured: a library
        may allocate memory at the first pass in a shape, which cannot be recorded.
        Raises DeviceError for shapes that no profile takes, and ValueError for arrays that the contract does
        not name, of another type or at an address that is no multiple of 256.
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
        found = {name: engine.get_tensor_mode(name) == inputs for name in names}
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
        """The cache's outputs, each with its input."""
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

    def _execute(self, context: Context) -> None:
        self._device.select()
        if not context.library.execute_async_v3(self._device.stream):
            raise self._device.fail(f"{self._name}: execute_async_v3 refused a pass")

    def _can_be_captured(self, context: Context) -> bool:
        self._device.select()
        if context.can_be_captured(self._device.stream):
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
        """The first profile that takes these sizes."""
        for index, profile in enumerate(self._profiles):
            # Axes of outputs alone follow from the others.
            if all(low <= sizes[axis] <= high for axis, (low, _, high) in profile.items()):
                return index
        raise DeviceError(f"{self._name}: no optimisation profile takes {sizes}")


@dataclass(frozen=True)
class _Pass:
    """A pass that is prepared. can_be_captured: as ``runtime.device.device.can_be_captured`` asks it"""

    launch: Callable[[], None]
    can_be_captured: Callable[[], bool]

    def __call__(self) -> None:
        self.launch()
