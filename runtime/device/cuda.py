"""A GPU as a ``Device``, by the CUDA runtime's Python bindings: how it is found, opened and used."""

import ctypes
import importlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import DeviceError, DeviceMemoryError, RequestError
from runtime.device.device import ITEM_SIZES, DeviceArray, Launch


class CudaDevice:
    """One GPU and one stream of it.

    cudart: ``cuda.bindings.runtime``
    index: which GPU, in the driver's order

    After an error of work on the stream, or of waiting for it, the GPU's memory is undefined. The device
    remembers such an error, and every later call but ``close`` raises DeviceError that names it. A failed
    allocation does not make the device unusable. One thread at a time may use the device, and such a thread
    must use no other GPU.
    """

    is_gpu = True

    def __init__(self, cudart: Any, index: int = 0):
        self._cudart = cudart
        self.index = index
        self._failure: str | None = None
        self._memory: list[int] = []
        self._host_memory: list[int] = []
        # Host arrays that pending work reads or writes; they must live until it is done.
        self._held: list[NDArray[Any]] = []
        # Executable graphs, each with objects that have to live as long.
        self._graphs: list[tuple[Any, Any]] = []
        self._events: list[Any] = []
        self._unused_events: list[Any] = []
        self._at_close: list[Callable[[], Any]] = []
        self._when_prepared: list[Callable[[], Any]] = []
        # Work on the default stream would wait for that of all others. Libraries expect a stream as a number.
        self.stream = int(self._call("cudaStreamCreateWithFlags", cudart.cudaStreamNonBlocking))

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        array = DeviceArray(0, tuple(shape), dtype)
        # An engine needs an address even for an array without elements.
        size = max(array.nbytes, 1)
        address = self._allocate("cudaMalloc", size)
        self._memory.append(address)
        self._call("cudaMemsetAsync", address, 0, size, self.stream)
        return DeviceArray(address, array.shape, dtype)

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Zeros in pinned memory, which must not be touched after ``close``.

        bfloat16 comes as its bits in uint16, because numpy has no such type.
        """
        count = math.prod(shape)
        size = max(count * ITEM_SIZES[dtype], 1)
        address = self._allocate("cudaHostAlloc", size, self._cudart.cudaHostAllocDefault)
        self._host_memory.append(address)
        ctypes.memset(address, 0, size)
        memory = memoryview((ctypes.c_ubyte * size).from_address(address))
        return np.frombuffer(memory, "uint16" if dtype == "bfloat16" else dtype, count).reshape(shape)

    def upload(self, source: NDArray[Any], target: DeviceArray) -> None:
        self._hold(source, target)
        self._copy(target.address, source.ctypes.data, source.nbytes, "cudaMemcpyHostToDevice")

    def download(self, source: DeviceArray, target: NDArray[Any]) -> None:
        self._hold(target, source)
        self._copy(target.ctypes.data, source.address, target.nbytes, "cudaMemcpyDeviceToHost")

    def clear(self, array: DeviceArray) -> None:
        if array.nbytes:
            self._call("cudaMemsetAsync", array.address, 0, array.nbytes, self.stream)

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        if source.nbytes > target.nbytes:
            raise ValueError(f"{source.nbytes} bytes cannot be copied to an array of {target.nbytes}")
        self._copy(target.address, source.address, source.nbytes, "cudaMemcpyDeviceToDevice")

    def copy_blocks(
        self, source: DeviceArray, target: DeviceArray, *, count: int, size: int, pitch: int
    ) -> None:
        if not count or not size:
            return
        end = (count - 1) * pitch + size
        if size > pitch or end > min(source.nbytes, target.nbytes):
            raise ValueError(
                f"{count} blocks of {size} bytes, {pitch} bytes apart, do not fit arrays of "
                f"{source.nbytes} and {target.nbytes} bytes"
            )
        kind = self._cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call(
            "cudaMemcpy2DAsync",
            *(target.address, pitch, source.address, pitch, size, count, kind, self.stream),
        )

    def capture(self, work: Launch) -> Launch:
        """Record what ``work`` puts on the stream; the graph lives as long as the device.

        Engines must have run in the same shapes before. ``work`` must not allocate, use events or
        synchronize, and may upload from and download to arrays of ``host_array`` only.
        """
        # Other threads may allocate meanwhile.
        mode = self._cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self.stream, mode)
        held, self._held = self._held, []
        try:
            work()
        except BaseException:
            # Otherwise the stream would go on recording. The unfinished graph is destroyed.
            error, unfinished = self._cudart.cudaStreamEndCapture(self.stream)
            if error == self._cudart.cudaError_t.cudaSuccess:
                self._cudart.cudaGraphDestroy(unfinished)
            raise
        finally:
            recorded, self._held = self._held, held
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            executable = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._cudart.cudaGraphDestroy(graph)
        # ``work`` keeps the execution contexts of the engines whose passes were recorded.
        self._graphs.append((executable, (work, recorded)))
        return lambda: self._call("cudaGraphLaunch", executable, self.stream)

    def mark(self) -> Any:
        if self._unused_events:
            event = self._unused_events.pop()
        else:
            event = self._call("cudaEventCreate", lasting=False)
            self._events.append(event)
        self._call("cudaEventRecord", event, self.stream)
        return _Mark(event, self._unused_events)

    def milliseconds(self, first: Any, second: Any) -> float:
        return float(self._call("cudaEventElapsedTime", first.event, second.event, lasting=False))

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)
        self._held.clear()

    def close(self) -> None:
        """Wait, and free everything. Raises DeviceError if the last work failed, after freeing all."""
        cudart = self._cudart
        closed = f"cuda:{self.index} is closed"
        if self._failure == closed:
            return
        try:
            if self._failure is None:
                self.synchronize()
        finally:
            # After an error the driver may refuse these calls too; their results are ignored.
            cudart.cudaStreamSynchronize(self.stream)
            for executable, _ in self._graphs:
                cudart.cudaGraphExecDestroy(executable)
            for release in reversed(self._at_close):
                release()
            for event in self._events:
                cudart.cudaEventDestroy(event)
            for address in self._memory:
                cudart.cudaFree(address)
            for address in self._host_memory:
                cudart.cudaFreeHost(address)
            cudart.cudaStreamDestroy(self.stream)
            for kept in (self._graphs, self._events, self._unused_events, self._held, self._at_close):
                kept.clear()
            self._when_prepared.clear()
            self._failure = closed

    def at_close(self, release: Callable[[], Any]) -> None:
        self._at_close.append(release)

    def select(self) -> None:
        if self._failure is not None:
            raise DeviceError(self._failure)
        # In every call, because other code of this thread may have chosen another GPU meanwhile.
        check_result(self._cudart, "cudaSetDevice", *self._cudart.cudaSetDevice(self.index))

    def free_memory(self) -> tuple[int, int]:
        self.select()
        error, free, total = self._cudart.cudaMemGetInfo()
        check_result(self._cudart, "cudaMemGetInfo", error)
        return int(free), int(total)

    def driver_version(self) -> int:
        """The version of CUDA that the driver is made for, such as 13000 for 13.0."""
        return int(self._call("cudaDriverGetVersion", lasting=False))

    def describe_kind(self) -> str:
        """The GPU's name and compute capability, such as ``NVIDIA L40S sm89``."""
        name = self._call("cudaGetDeviceProperties", self.index, lasting=False).name
        text = name.decode() if isinstance(name, bytes) else str(name)
        return f"{text} {capability_of_gpu(self._cudart, self.index)}"

    def when_prepared(self, work: Callable[[], Any]) -> None:
        """``prepared`` calls ``work``."""
        self._when_prepared.append(work)

    def prepared(self) -> None:
        for work in self._when_prepared:
            work()

    def describe_memory(self) -> str:
        """The free memory, in words for messages."""
        try:
            free, total = self.free_memory()
        except DeviceError as error:
            return f"what is free is unknown ({error})"
        return f"{free} of the GPU's {total} bytes are free"

    def fail(self, reason: str) -> DeviceError:
        self._failure = f"cuda:{self.index} is unusable since {reason}"
        return DeviceError(reason)

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        if size:
            flag = getattr(self._cudart.cudaMemcpyKind, kind)
            self._call("cudaMemcpyAsync", target, source, size, flag, self.stream)

    def _hold(self, host: NDArray[Any], array: DeviceArray) -> None:
        if host.nbytes != array.nbytes or not host.flags.c_contiguous:
            raise ValueError(
                f"a copy needs a host array without gaps of {array.nbytes} bytes, got {host.nbytes} bytes"
            )
        self._held.append(host)

    def _allocate(self, function: str, size: int, *arguments: Any) -> int:
        self.select()
        error, address = getattr(self._cudart, function)(size, *arguments)
        if error == self._cudart.cudaError_t.cudaSuccess:
            return int(address)
        if error != self._cudart.cudaError_t.cudaErrorMemoryAllocation:
            check_result(self._cudart, function, error)
        reason = describe_error(self._cudart, error)
        if function == "cudaHostAlloc":
            raise pinned_memory_error(reason, size)
        raise DeviceMemoryError(
            f"{function}: {reason}: {size} bytes wanted, {self.describe_memory()}; smaller max_length, "
            "max_num_seqs or max_nodes need less"
        )

    def _call(self, function: str, *arguments: Any, lasting: bool = True) -> Any:
        """lasting: whether an error makes the device unusable"""
        self.select()
        error, *values = getattr(self._cudart, function)(*arguments)
        if error != self._cudart.cudaError_t.cudaSuccess:
            reason = f"{function}: {describe_error(self._cudart, error)}"
            raise self.fail(reason) if lasting else DeviceError(reason)
        return values[0] if values else None


class _Mark:
    """An event, which is used again when its mark is deleted."""

    def __init__(self, event: Any, unused: list[Any]):
        self.event, self._unused = event, unused

    def __del__(self) -> None:
        self._unused.append(self.event)


def load_cudart() -> Any | None:
    """The CUDA runtime's bindings, if they are installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None


def capability_of_gpu(cudart: Any, index: int = 0) -> str | None:
    """A GPU's compute capability, such as ``sm89``; None without that GPU or a driver."""
    error, count = cudart.cudaGetDeviceCount()
    if error != cudart.cudaError_t.cudaSuccess or index >= count:
        return None
    attributes = cudart.cudaDeviceAttr
    wanted = attributes.cudaDevAttrComputeCapabilityMajor, attributes.cudaDevAttrComputeCapabilityMinor
    major, minor = (cudart.cudaDeviceGetAttribute(attribute, index)[1] for attribute in wanted)
    return f"sm{major}{minor}"


def check_device_name(name: str) -> int:
    """The number of the GPU of a name such as ``cuda:1``. Raises RequestError for another name."""
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if not found:
        raise RequestError(f"device: must be cpu, cuda:0, cuda:1 and so on, got {name!r}")
    return int(found[1] or 0)


def open_cuda_device(name: str) -> CudaDevice:
    """The GPU of a name such as ``cuda:0``; ``cuda`` is the first.

    Raises RequestError for another name, and DeviceError where the bindings or that GPU are missing.
    """
    index = check_device_name(name)
    cudart = load_cudart()
    if cudart is None:
        raise DeviceError(
            f"{name}: the CUDA runtime's bindings are not installed; "
            "pip install -c constraints.txt -e '.[tensorrt-rtx]' brings them"
        )
    error, count = cudart.cudaGetDeviceCount()
    if error != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"{name}: this machine has no GPU or no driver: {describe_error(cudart, error)}")
    if index >= count:
        raise DeviceError(f"{name}: this machine has {count} GPUs, which count from cuda:0")
    return CudaDevice(cudart, index)


def describe_error(cudart: Any, error: Any) -> str:
    """The driver's text for an error."""
    text = cudart.cudaGetErrorString(error)[1]
    return text.decode() if isinstance(text, bytes) else str(text)


def check_result(cudart: Any, function: str, error: Any) -> None:
    """Raises DeviceError if a function returned an error."""
    if error != cudart.cudaError_t.cudaSuccess:
        raise DeviceError(f"{function}: {describe_error(cudart, error)}")


def pinned_memory_error(reason: str, size: int) -> DeviceMemoryError:
    """The error where ``size`` bytes of pinned memory cannot be had, for the driver's reason."""
    return DeviceMemoryError(
        f"cudaHostAlloc: {reason}: {size} bytes of the host's memory wanted, for the GPU to read and write; "
        "smaller max_num_seqs or max_nodes need less, and a limit of locked memory (ulimit -l) may be low"
    )
