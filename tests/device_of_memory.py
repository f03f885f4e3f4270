"""A stand-in for the CUDA runtime, its driver and TensorRT's runtime whose device memory is host memory.

Streams are lazy: what is put on one is done when somebody waits for it, so that whoever reads too early
sees old data. A plan is the path of an ONNX file, which ONNX Runtime runs at the addresses that it was given.
What a real driver would let corrupt memory, or refuse, or serialise, raises ``Fault`` where it is done.
"""

import bisect
import ctypes
import functools
import inspect
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.core.bundle import EngineProfile, GraphSpec, TensorSpec
from runtime.device.kernels.arguments import KERNELS, KernelLaunch

if TYPE_CHECKING:
    from export.verify.host_kernels import HostKernels

# cudaMalloc's alignment, and what TensorRT demands of addresses.
ALIGNMENT = 256
# Passes for which kernels are general while others are compiled in the background.
GENERAL_PASSES = 5
# After these errors a real process can only be restarted: every later call returns them.
DEADLY = {700, 719}
MESSAGES = {
    2: "out of memory",
    600: "device not ready",
    700: "an illegal memory access was encountered",
    719: "unspecified launch failure",
}


class Fault(AssertionError):
    """A mistake of the caller."""


@dataclass
class Block:
    """Memory that was allocated at once. It is kept when freed, so that its address never comes back."""

    start: int
    size: int
    is_pinned: bool
    storage: Any
    is_freed: bool = False


class Memory:
    """All blocks, found by any address inside."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: list[Block] = []

    def add(self, size: int, *, is_pinned: bool) -> int:
        storage = (ctypes.c_ubyte * (size + ALIGNMENT))()
        start = -(-ctypes.addressof(storage) // ALIGNMENT) * ALIGNMENT
        # Real memory is not zero when it is allocated.
        ctypes.memset(start, 0xA5, size)
        index = bisect.bisect(self._starts, start)
        self._starts.insert(index, start)
        self._blocks.insert(index, Block(start, size, is_pinned, storage))
        return start

    def find(self, address: int) -> Block | None:
        index = bisect.bisect(self._starts, address) - 1
        block = self._blocks[index] if index >= 0 else None
        return block if block and address < block.start + block.size else None

    def check(self, address: int, size: int, *, is_pinned: bool = False) -> None:
        """Raises Fault unless one block of this kind holds all of it."""
        block = self.find(address)
        if block is None or block.is_pinned != is_pinned:
            raise Fault(f"no block of {'pinned' if is_pinned else 'device'} memory holds {address:#x}")
        if block.is_freed:
            raise Fault(f"{address:#x} is in memory that was freed")
        if address + size > block.start + block.size:
            raise Fault(f"{size} bytes at {address:#x} reach beyond their block of {block.size} bytes")

    def free(self, address: int, *, is_pinned: bool) -> None:
        self.check(address, 0, is_pinned=is_pinned)
        block = self.find(address)
        assert block is not None
        if block.start != address:
            raise Fault(f"{address:#x} is inside a block and cannot be freed")
        block.is_freed = True

    def live(self, *, is_pinned: bool = False) -> list[Block]:
        return [block for block in self._blocks if block.is_pinned == is_pinned and not block.is_freed]


@dataclass(frozen=True)
class Work:
    """Something that a stream does, and the memory it touches: addresses, sizes, whether it is pinned.

    kernel: which of ours it is
    """

    do: Callable[[], None]
    areas: tuple[tuple[int, int, bool], ...] = ()
    kernel: str | None = None


@dataclass
class Stream:
    """pending: put there and not done yet; recorded: of the capture in progress, if there is one"""

    pending: deque[Work] = field(default_factory=deque)
    recorded: list[Work] | None = None


def _driver_call(*, results: int = 0, while_capturing: bool = True) -> Any:
    """A function of the driver: it fails when it was told to, and always once the device is dead.

    results: values that it returns beside the error
    while_capturing: whether it is allowed while a stream captures
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(self: "FakeCudart", *arguments: Any) -> Any:
            name = function.__name__
            inspect.signature(function).bind(self, *arguments)
            if not while_capturing and any(s.recorded is not None for s in self.streams.values()):
                raise Fault(f"{name} while a stream captures")
            queue = self.failures.get(name)
            if not self.dead and queue:
                error = queue.pop(0)
                self.dead = error if error in DEADLY else 0
            else:
                error = self.dead
            if not error:
                return function(self, *arguments)
            if name == "cudaStreamEndCapture":
                # The real one ends the capture even when it returns an error.
                self._stream(arguments[0]).recorded = None
            return (error, *[None] * results)

        return call

    return decorate


class FakeCudart:
    """The functions of ``cuda.bindings.runtime`` that are called; ``memory``: bytes of the device."""

    cudaHostAllocDefault = 0
    cudaStreamNonBlocking = 1

    class cudaError_t(IntEnum):
        cudaSuccess = 0
        cudaErrorMemoryAllocation = 2

    class cudaMemcpyKind(Enum):
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2
        cudaMemcpyDeviceToDevice = 3

    class cudaDeviceAttr(Enum):
        cudaDevAttrComputeCapabilityMajor = 75
        cudaDevAttrComputeCapabilityMinor = 76
        cudaDevAttrMemoryClockRate = 36
        cudaDevAttrGlobalMemoryBusWidth = 37

    class cudaStreamCaptureMode(Enum):
        cudaStreamCaptureModeThreadLocal = 1

    def __init__(self, memory: int = 2**30, capability: tuple[int, int] = (8, 9)):
        self.memory_limit = memory
        self.capability = capability
        # With 256 bits that move twice a cycle, 64 GB/s.
        self.memory_clock_khz = 1_000_000
        self.memory = Memory()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, float | None] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.executables: dict[int, list[Work]] = {}
        self.failures: dict[str, list[int]] = {}
        self.dead = 0
        self._handles = itertools.count(1)

    @property
    def blocks(self) -> list[Block]:
        """Device memory that was allocated and not freed."""
        return self.memory.live()

    def leftovers(self) -> list[str]:
        """What was made and not destroyed."""
        kinds = {
            "device memory": self.memory.live(),
            "pinned memory": self.memory.live(is_pinned=True),
            "streams": self.streams,
            "events": self.events,
            "graphs": self.graphs,
            "executables": self.executables,
        }
        return [kind for kind, found in kinds.items() if found]

    def fail_next(self, function: str, error: int) -> None:
        """The next call of a function returns this error and does nothing."""
        if not hasattr(self, function):
            raise AttributeError(function)
        self.failures.setdefault(function, []).append(error)

    def put(self, stream: int, work: Work, *, reads_pageable: bool = False) -> None:
        """Record work, or leave it for later."""
        found = self._stream(stream)
        for address, size, is_pinned in work.areas:
            self.memory.check(address, size, is_pinned=is_pinned)
        if found.recorded is None:
            found.pending.append(work)
        elif reads_pageable:
            raise Fault("a copy from or to memory that is not pinned is captured")
        else:
            found.recorded.append(work)

    def is_capturing(self, stream: int) -> bool:
        return self._stream(stream).recorded is not None

    def _stream(self, stream: int) -> Stream:
        if not stream:
            raise Fault("work on the default stream")
        if stream not in self.streams:
            raise Fault(f"there is no stream {stream}")
        return self.streams[stream]

    def _refuse_pending(self, address: int) -> None:
        """Raises Fault if work that is not done yet uses the block of an address."""
        block = self.memory.find(address)
        for stream in self.streams.values():
            for work in stream.pending:
                if any(self.memory.find(used) is block for used, _, _ in work.areas):
                    raise Fault("memory is freed that work not yet done uses")

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaDeviceGetAttribute(self, attr: Any, device: int) -> tuple[int, int]:
        attributes = self.cudaDeviceAttr
        return 0, {
            attributes.cudaDevAttrComputeCapabilityMajor: self.capability[0],
            attributes.cudaDevAttrComputeCapabilityMinor: self.capability[1],
            attributes.cudaDevAttrMemoryClockRate: self.memory_clock_khz,
            attributes.cudaDevAttrGlobalMemoryBusWidth: 256,
        }[attr]

    def cudaDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13000

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, SimpleNamespace]:
        return 0, SimpleNamespace(name=b"Device of memory", totalGlobalMem=self.memory_limit)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, MESSAGES.get(error, f"error {error:d}").encode()

    @_driver_call()
    def cudaSetDevice(self, device: int) -> tuple[int]:
        return (0 if device == 0 else 101,)

    @_driver_call(results=2)
    def cudaMemGetInfo(self) -> tuple[int, int, int]:
        used = sum(block.size for block in self.memory.live())
        return 0, self.memory_limit - used, self.memory_limit

    @_driver_call(results=1, while_capturing=False)
    def cudaMalloc(self, size: int) -> tuple[int, int]:
        if sum(block.size for block in self.memory.live()) + size > self.memory_limit:
            return 2, 0
        return 0, self.memory.add(size, is_pinned=False)

    @_driver_call(results=1, while_capturing=False)
    def cudaHostAlloc(self, size: int, flags: int) -> tuple[int, int]:
        return 0, self.memory.add(size, is_pinned=True)

    @_driver_call(while_capturing=False)
    def cudaFree(self, devPtr: int) -> tuple[int]:
        self._refuse_pending(devPtr)
        self.memory.free(devPtr, is_pinned=False)
        return (0,)

    @_driver_call(while_capturing=False)
    def cudaFreeHost(self, ptr: int) -> tuple[int]:
        self._refuse_pending(ptr)
        self.memory.free(ptr, is_pinned=True)
        return (0,)

    @_driver_call()
    def cudaMemsetAsync(self, devPtr: int, value: int, count: int, stream: int) -> tuple[int]:
        def fill() -> None:
            ctypes.memset(devPtr, value, count)

        self.put(stream, Work(fill, ((devPtr, count, False),)))
        return (0,)

    @_driver_call()
    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> tuple[int]:
        def copy() -> None:
            ctypes.memmove(dst, src, count)

        on_device = {
            self.cudaMemcpyKind.cudaMemcpyHostToDevice: (True, False),
            self.cudaMemcpyKind.cudaMemcpyDeviceToHost: (False, True),
            self.cudaMemcpyKind.cudaMemcpyDeviceToDevice: (True, True),
        }[kind]
        areas = []
        reads_pageable = False
        for address, is_on_device in zip((dst, src), on_device, strict=True):
            block = self.memory.find(address)
            if is_on_device:
                areas.append((address, count, False))
            elif block is None:
                reads_pageable = True
            else:
                areas.append((address, count, True))
        if all(on_device) and abs(dst - src) < count:
            raise Fault("the two sides of a copy overlap")
        do = copy
        if reads_pageable and on_device[0]:
            # A real driver puts such an array into a buffer of its own before it returns.
            staged = ctypes.string_at(src, count)

            def do() -> None:
                ctypes.memmove(dst, staged, count)

        self.put(stream, Work(do, tuple(areas)), reads_pageable=reads_pageable)
        return (0,)

    @_driver_call()
    def cudaMemcpy2DAsync(
        self,
        dst: int,
        dpitch: int,
        src: int,
        spitch: int,
        width: int,
        height: int,
        kind: Any,
        stream: int,
    ) -> tuple[int]:
        if kind is not self.cudaMemcpyKind.cudaMemcpyDeviceToDevice:
            raise Fault("the stand-in copies blocks within the device only")
        if width > min(dpitch, spitch):
            return (12,)

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(dst + row * dpitch, src + row * spitch, width)

        rows = max(height - 1, 0)
        areas = ((dst, rows * dpitch + width, False), (src, rows * spitch + width, False))
        if any(
            abs(dst + i * dpitch - src - j * spitch) < width for i in range(height) for j in range(height)
        ):
            raise Fault("the two sides of a copy overlap")
        self.put(stream, Work(copy, areas))
        return (0,)

    @_driver_call(results=1)
    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        if flags != self.cudaStreamNonBlocking:
            raise Fault("the stream waits for the default stream")
        handle = next(self._handles)
        self.streams[handle] = Stream()
        return 0, handle

    @_driver_call(while_capturing=False)
    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        if self._stream(stream).pending:
            raise Fault("a stream is destroyed whose work is not done")
        del self.streams[stream]
        return (0,)

    @_driver_call(while_capturing=False)
    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        pending = self._stream(stream).pending
        while pending:
            pending.popleft().do()
        return (0,)

    @_driver_call(while_capturing=False)
    def cudaStreamBeginCapture(self, stream: int, mode: Any) -> tuple[int]:
        self._stream(stream).recorded = []
        return (0,)

    @_driver_call(results=1)
    def cudaStreamEndCapture(self, stream: int) -> tuple[int, int]:
        recorded = self._stream(stream).recorded
        if recorded is None:
            raise Fault("the stream does not capture")
        self._stream(stream).recorded = None
        handle = next(self._handles)
        self.graphs[handle] = recorded
        return 0, handle

    @_driver_call(results=1)
    def cudaGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        handle = next(self._handles)
        self.executables[handle] = self.graphs[graph]
        return 0, handle

    @_driver_call()
    def cudaGraphDestroy(self, graph: int) -> tuple[int]:
        del self.graphs[graph]
        return (0,)

    @_driver_call(while_capturing=False)
    def cudaGraphLaunch(self, graphExec: int, stream: int) -> tuple[int]:
        if graphExec not in self.executables:
            raise Fault("a graph is launched that was destroyed")
        for work in self.executables[graphExec]:
            self.put(stream, work)
        return (0,)

    @_driver_call()
    def cudaGraphExecDestroy(self, graphExec: int) -> tuple[int]:
        if graphExec not in self.executables:
            raise Fault("a graph is destroyed twice")
        del self.executables[graphExec]
        return (0,)

    @_driver_call(results=1)
    def cudaEventCreate(self) -> tuple[int, int]:
        handle = next(self._handles)
        self.events[handle] = None
        return 0, handle

    @_driver_call(while_capturing=False)
    def cudaEventRecord(self, event: int, stream: int) -> tuple[int]:
        if event not in self.events:
            raise Fault("an event is used that was destroyed")

        def record() -> None:
            self.events[event] = time.perf_counter()

        self.events[event] = None
        self.put(stream, Work(record))
        return (0,)

    @_driver_call(results=1)
    def cudaEventElapsedTime(self, start: int, end: int) -> tuple[int, float | None]:
        first, second = self.events[start], self.events[end]
        if first is None or second is None:
            return 600, None
        return 0, (second - first) * 1000

    @_driver_call()
    def cudaEventDestroy(self, event: int) -> tuple[int]:
        del self.events[event]
        return (0,)


class FakeDriver:
    """The functions of ``cuda.bindings.driver`` that are called; kernels run on the host in their turn.

    refused: functions that return an error
    """

    class CUresult(IntEnum):
        CUDA_SUCCESS = 0
        CUDA_ERROR_INVALID_VALUE = 1
        CUDA_ERROR_INVALID_CONTEXT = 201
        CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222

    class CUdevice_attribute(Enum):
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97

    class CUfunction_attribute(Enum):
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    # What a block can share, and what the system keeps of it for every kernel.
    SHARED, RESERVED = 101_376, 1024

    def __init__(self, cudart: FakeCudart, kernels: "HostKernels"):
        self.cudart, self.kernels = cudart, kernels
        self.refused: dict[str, int] = {}
        self.modules: dict[int, bytes] = {}
        # The context that each thread works in, and how often somebody holds the GPU's own.
        self._current = threading.local()
        self.num_retained = 0
        self._functions: dict[int, str] = {}
        self._limits: dict[int, int] = {}
        self._handles = itertools.count(1)

    def cuGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, f"error {error:d} of the driver".encode()

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDeviceGetAttribute(self, attrib: Any, dev: int) -> tuple[int, int]:
        major, minor = self.cudart.capability
        attributes = self.CUdevice_attribute
        return 0, {
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
            attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: self.SHARED,
        }[attrib]

    def cuDevicePrimaryCtxRetain(self, dev: int) -> tuple[int, int]:
        self.num_retained += 1
        return 0, 1

    def cuDevicePrimaryCtxRelease(self, dev: int) -> tuple[int]:
        self.num_retained -= 1
        return (0,)

    def cuCtxSetCurrent(self, ctx: int) -> tuple[int]:
        self._current.context = ctx
        return (0,)

    def cuModuleLoadData(self, image: bytes) -> tuple[int, int]:
        if not hasattr(self._current, "context"):
            return self.CUresult.CUDA_ERROR_INVALID_CONTEXT, 0
        if "cuModuleLoadData" in self.refused:
            return self.refused["cuModuleLoadData"], 0
        if any(stream.recorded is not None for stream in self.cudart.streams.values()):
            raise Fault("a module is loaded while a stream captures")
        if image[:4] != b"\x7fELF" and not (b".target sm_" in image and image.endswith(b"\0")):
            raise Fault("a module is neither machine code nor text that ends with a zero")
        handle = next(self._handles)
        self.modules[handle] = image
        return 0, handle

    def cuModuleUnload(self, hmod: int) -> tuple[int]:
        del self.modules[hmod]
        return (0,)

    def cuModuleGetFunction(self, hmod: int, name: bytes) -> tuple[int, int]:
        if name not in self.modules[hmod]:
            raise Fault(f"the module has no {name.decode()}")
        handle = next(self._handles)
        self._functions[handle] = name.decode()
        return 0, handle

    def cuFuncGetAttribute(self, attrib: Any, hfunc: int) -> tuple[int, int]:
        assert attrib is self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        return 0, self.RESERVED

    def cuFuncSetAttribute(self, hfunc: int, attrib: Any, value: int) -> tuple[int]:
        assert attrib is self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if value + self.RESERVED > self.SHARED:
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._limits[hfunc] = value
        return (0,)

    def cuLaunchKernel(
        self,
        f: int,
        *sizes: int,
    ) -> tuple[int]:
        """sizes: of the grid, of a block, of its shared memory; then stream, parameters and no extra"""
        *grid, threads, rows, planes, shared_bytes, stream, parameters, extra = sizes
        if not hasattr(self._current, "context"):
            return (self.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if shared_bytes > self._limits.get(f, 48 * 1024) or not all(0 < size < 2**16 for size in grid):
            return (self.CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert (rows, planes, extra) == (1, 1, 0)
        assert threads <= 1024
        name = self._functions[f]
        address = ctypes.c_void_p.from_address(parameters).value
        assert address
        arguments = KERNELS[name].from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(KERNELS[name])))
        areas = tuple((each, 1, False) for each in _addresses(arguments))
        launch = KernelLaunch(name, (grid[0], grid[1], grid[2]), threads, shared_bytes, arguments)
        self.cudart.put(stream, Work(lambda: self.kernels.launch(launch), areas, name))
        return (0,)


def _addresses(values: Any) -> Iterator[int]:
    """All addresses of a structure or an array that are not null."""
    if hasattr(values, "_fields_"):
        members = [(getattr(values, name), kind) for name, kind in values._fields_]
    else:
        members = [(value, values._type_) for value in values]
    for value, kind in members:
        if kind is ctypes.c_void_p:
            if value:
                yield value
        elif kind is not ctypes.c_int:
            yield from _addresses(value)


class FakeTensorRT:
    """The runtime half of ``tensorrt_rtx_bindings``: engines for one contract and its profiles, or several.

    engines: contract and profiles of every plan, by the path that the plan is; other plans are for
        ``contract`` and ``profiles``
    is_aliased: whether the engines update their caches in place
    refused: calls of a context that return False
    scratch: bytes that a context of an engine needs, by the name of the plan's file; 1000 of others
    queries: shapes of outputs in half precision that the contract does not name; a pass fills them with noise
    """

    __version__ = "0"
    __name__ = "tensorrt_of_memory"

    class ExecutionContextAllocationStrategy(IntEnum):
        STATIC = 0
        USER_MANAGED = 2

    class DynamicShapesKernelSpecializationStrategy(IntEnum):
        LAZY = 0
        EAGER = 1

    class TensorIOMode(IntEnum):
        INPUT = 1
        OUTPUT = 2

    def __init__(
        self,
        cudart: FakeCudart,
        contract: GraphSpec | None = None,
        profiles: tuple[EngineProfile, ...] = (),
        *,
        engines: Mapping[Path, tuple[GraphSpec, tuple[EngineProfile, ...]]] | None = None,
        is_aliased: bool = True,
    ):
        self.cudart, self.contract, self.profiles = cudart, contract, profiles
        self.engines = engines or {}
        self.is_aliased = is_aliased
        self.refused: set[str] = set()
        self.scratch: dict[str, int] = {}
        self.queries: dict[str, tuple[int, ...]] = {}
        # Kernels that no runtime cache had.
        self.num_compiled = 0
        # Of every context that was created.
        self.settings: list[FakeRuntimeConfig] = []

    def Runtime(self, log: Any) -> "FakeTensorRT":
        return self

    def deserialize_cuda_engine(self, serialized_engine: memoryview) -> "FakeEngine | None":
        path = Path(bytes(serialized_engine).decode())
        return FakeEngine(self, path) if path.is_file() else None


class FakeEngine:
    num_io_tensors = property(lambda self: len(self._names))
    device_memory_size_v2 = property(lambda self: self._library.scratch.get(self.path.stem, 1000))

    def __init__(self, library: FakeTensorRT, path: Path):
        self._library, self.path = library, path
        contract, self.profiles = library.engines.get(path, (library.contract, library.profiles))
        assert contract is not None, f"nobody told what {path} is"
        self.contract = contract
        self._names = [tensor.name for tensor in (*contract.inputs, *contract.outputs)] + list(
            library.queries
        )
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with _runnable(path, contract) as (model, self._is_up_cast):
            self._session = ort.InferenceSession(model, options)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> int:
        modes = self._library.TensorIOMode
        return modes.INPUT if any(t.name == name for t in self.contract.inputs) else modes.OUTPUT

    def get_aliased_input_tensor(self, name: str) -> str | None:
        is_cache = name.startswith("present_") and self._library.is_aliased
        return name.replace("present_", "past_", 1) if is_cache else None

    def create_runtime_config(self) -> "FakeRuntimeConfig":
        return FakeRuntimeConfig(self._library)

    def create_execution_context(self, runtime_config: Any = None) -> "FakeContext":
        """From settings or, as the other overload has it, from an allocation strategy alone."""
        settings = runtime_config
        if not isinstance(settings, FakeRuntimeConfig):
            settings = self.create_runtime_config()
            settings.set_execution_context_allocation_strategy(runtime_config or 0)
        self._library.settings.append(settings)
        is_static = settings.allocation == self._library.ExecutionContextAllocationStrategy.STATIC
        eager = FakeTensorRT.DynamicShapesKernelSpecializationStrategy.EAGER
        is_eager = settings.dynamic_shapes_kernel_specialization_strategy == eager
        scratch, general_passes = 2**62 if is_static else 0, 0 if is_eager else GENERAL_PASSES
        return FakeContext(self, self._library, scratch, general_passes, settings.cache)

    def _compute(self, feeds: dict[str, NDArray[Any]], outputs: list[str]) -> list[NDArray[Any]]:
        if self._is_up_cast:
            floats = {n for n, a in feeds.items() if a.dtype == _numpy_type("bfloat16")}
            feeds = {n: a.astype(np.float32) if n in floats else a for n, a in feeds.items()}
        return self._session.run(outputs, feeds)


class FakeRuntimeConfig:
    """allocation, cache: as they were set"""

    def __init__(self, library: FakeTensorRT) -> None:
        self._library = library
        self.allocation: int = FakeTensorRT.ExecutionContextAllocationStrategy.STATIC
        lazy = FakeTensorRT.DynamicShapesKernelSpecializationStrategy.LAZY
        self.dynamic_shapes_kernel_specialization_strategy: int = lazy
        self.cache: FakeRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: int) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> "FakeRuntimeCache":
        return FakeRuntimeCache(self._library)

    def set_runtime_cache(self, cache: "FakeRuntimeCache") -> bool:
        self.cache = cache
        return True


class FakeRuntimeCache:
    """kernels: the plans and shapes for which there are kernels, as text"""

    def __init__(self, library: FakeTensorRT):
        self._library = library
        self.kernels: set[str] = set()

    def serialize(self) -> memoryview:
        return memoryview(json.dumps([self._environment(), *sorted(self.kernels)]).encode())

    def deserialize(self, blob: bytes) -> bool:
        """Refuses what is damaged, and what comes from another library or GPU."""
        try:
            environment, *kernels = json.loads(bytes(blob))
        except ValueError:
            return False
        if environment != self._environment():
            return False
        self.kernels |= set(kernels)
        return True

    def _environment(self) -> list[Any]:
        return [self._library.__version__, *self._library.cudart.capability]


class FakeContext:
    """general_passes: first passes in new shapes, whose kernels are general ones"""

    def __init__(
        self,
        engine: FakeEngine,
        library: FakeTensorRT,
        scratch: int,
        general_passes: int,
        cache: FakeRuntimeCache | None = None,
    ):
        self._cache = cache
        self._general_passes = general_passes
        self._passes_in_shapes = 0
        self._engine, self._library, self._scratch_size = engine, library, scratch
        self._scratch = 0
        self._index: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        # The profile and shapes of the last pass that was not captured.
        self._warm: Any = None

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % ALIGNMENT:
            raise Fault(f"scratch memory must begin at a multiple of {ALIGNMENT} bytes")
        self._library.cudart.memory.check(memory, size)
        self._scratch, self._scratch_size = memory, size

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        # It only looks that this is a stream of ours.
        self._library.cudart.is_capturing(stream_handle)
        if profile_index != self._index:
            self._index, self._shapes = profile_index, {}
        return "set_optimization_profile_async" not in self._library.refused

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self._index is None:
            raise Fault("no optimisation profile was chosen")
        (tensor,) = [each for each in self._engine.contract.inputs if each.name == name]
        profile = self._engine.profiles[self._index]
        for axis, size in zip(tensor.shape, shape, strict=True):
            least, _, most = (axis, axis, axis) if isinstance(axis, int) else profile[axis]
            if not least <= size <= most:
                raise Fault(f"{name} of {shape} is outside the profile {profile}")
        self._shapes[name] = tuple(shape)
        return "set_input_shape" not in self._library.refused

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._library.queries[name]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory % ALIGNMENT == 0 and "set_tensor_address" not in self._library.refused

    def is_stream_capturable(self, stream: int) -> bool:
        if self._library.cudart.is_capturing(stream):
            raise Fault("whether a capture can begin is asked in the midst of one")
        return self._is_specialised() and "is_stream_capturable" not in self._library.refused

    def _is_specialised(self) -> bool:
        return self._passes_in_shapes >= self._general_passes

    def execute_async_v3(self, stream_handle: int) -> bool:
        if "execute_async_v3" in self._library.refused:
            return False
        cudart, contract = self._library.cudart, self._engine.contract
        if self._scratch_size < self._engine.device_memory_size_v2:
            raise Fault("the context has no scratch memory, or too little")
        at: dict[str, tuple[int, tuple[int, ...], Any]] = {}
        areas = [(self._scratch, self._scratch_size, False)] if self._scratch else []
        for tensor in (*contract.inputs, *contract.outputs):
            if tensor.name not in self._addresses:
                raise Fault(f"{tensor.name} has no address")
            address, shape = self._addresses[tensor.name], self._shape(tensor)
            dtype = _numpy_type(tensor.dtype)
            at[tensor.name] = address, shape, dtype
            areas.append((address, _nbytes(shape, dtype), False))
            alias = self._engine.get_aliased_input_tensor(tensor.name)
            if alias is not None and address != self._addresses[alias]:
                raise Fault(f"{tensor.name} must have the address of {alias}")
        queries = [
            (self._addresses[name], 2 * int(np.prod(shape))) for name, shape in self._library.queries.items()
        ]
        areas += [(address, size, False) for address, size in queries]
        self._refuse_overlaps({name: (start, _nbytes(*rest)) for name, (start, *rest) in at.items()})
        key = (self._index, dict(self._shapes))
        if not cudart.is_capturing(stream_handle):
            self._passes_in_shapes = self._passes_in_shapes + 1 if self._warm == key else 1
            kernel = f"{self._engine.path.name} {sorted(self._shapes.items())}"
            if self._cache is not None and kernel not in self._cache.kernels:
                self._cache.kernels.add(kernel)
                self._library.num_compiled += 1
            self._warm = key
        elif self._warm != key:
            raise Fault("the first pass in these shapes is captured; the library would allocate memory")
        elif not self._is_specialised():
            raise Fault("a pass is captured whose kernels are not specialised yet")

        def compute() -> None:
            feeds = {tensor.name: _at(*at[tensor.name]).copy() for tensor in contract.inputs}
            names = [tensor.name for tensor in contract.outputs]
            # A pass leaves nothing there that anyone could want.
            for address, size in (*queries, (self._scratch, self._scratch_size if self._scratch else 0)):
                ctypes.memset(address, 0x5A, size)
            for name, value in zip(names, self._engine._compute(feeds, names), strict=True):
                _at(*at[name])[...] = value.astype(at[name][2])

        cudart.put(stream_handle, Work(compute, tuple(areas)))
        return True

    def _refuse_overlaps(self, ranges: dict[str, tuple[int, int]]) -> None:
        """Raises Fault where a pass would write what it also reads or writes under another name.

        ranges: address and size by tensor
        Real kernels read and write in no order that could be relied on. Only a cache may be updated in place.
        """
        used = list(ranges.items())
        if self._scratch:
            used.append(("the scratch memory", (self._scratch, self._scratch_size)))
        written = {*(tensor.name for tensor in self._engine.contract.outputs), "the scratch memory"}
        for (one, (start, size)), (other, (other_start, other_size)) in itertools.combinations(used, 2):
            aliases = {self._engine.get_aliased_input_tensor(name) for name in (one, other)}
            if aliases & {one, other} or not written & {one, other}:
                continue
            if start < other_start + other_size and other_start < start + size:
                raise Fault(f"{one} and {other} overlap")

    def _shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        if tensor in self._engine.contract.inputs:
            if tensor.name not in self._shapes:
                raise Fault(f"{tensor.name} has no shape")
            return self._shapes[tensor.name]
        sizes = {
            axis: size
            for given in self._engine.contract.inputs
            for axis, size in zip(given.shape, self._shapes[given.name], strict=True)
            if isinstance(axis, str)
        }
        if not sizes.keys() >= {axis for axis in tensor.shape if isinstance(axis, str)}:
            from export.verify.runner import with_output_axes

            sizes = with_output_axes(sizes)
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)


def _runnable(path: Path, contract: GraphSpec) -> Any:
    """A file that ONNX Runtime can run, and whether its bfloat16 values are float32 there."""
    if all(tensor.dtype != "bfloat16" for tensor in (*contract.inputs, *contract.outputs)):
        return nullcontext((path, False))
    from export.verify.runner import runnable

    return runnable(path, contract)


def _numpy_type(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _nbytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The array at an address."""
    memory = (ctypes.c_ubyte * _nbytes(shape, dtype)).from_address(address)
    return np.ndarray(shape, dtype, memoryview(memory))
