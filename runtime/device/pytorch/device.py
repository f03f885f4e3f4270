"""A ``Device`` of PyTorch: a GPU with one stream and captured graphs, or the CPU for comparison."""

import contextlib
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.core.errors import DeviceError, DeviceMemoryError
from runtime.device.cuda import check_device_name, pinned_memory_error
from runtime.device.device import ALIGNMENT, CPU, ITEM_SIZES, DeviceArray, Launch

TYPES = {name: getattr(torch, name) for name in ITEM_SIZES}
# torch allows one capture at a time in a process: it begins by waiting for the whole GPU, others included.
_CAPTURES = threading.Lock()


class TorchDevice:
    """One GPU and one stream of it, or the CPU, where every call does its work before it returns.

    name: ``cpu``, or a GPU as ``cuda:0``
    Errors of work on a GPU are remembered as by ``CudaDevice``. In a thread that uses the device, torch's
    current stream is the device's until the thread uses another one.
    """

    def __init__(self, name: str):
        self.name = name
        self.is_gpu = name != CPU
        self._device = torch.device(name)
        self.index = self._device.index or 0
        self._failure: str | None = None
        # The addresses of all blocks in order, and the blocks at them.
        self._addresses: list[int] = []
        self._blocks: list[Tensor] = []
        # Memory of the host that pending or captured work reads or writes.
        self._host_memory: list[Tensor] = []
        self._held: list[NDArray[Any]] = []
        self._graphs: list[tuple[Any, Launch]] = []
        self._at_close: list[Callable[[], Any]] = []
        self._stream = torch.cuda.Stream(self._device) if self.is_gpu else None
        # Graphs run one after another and hand on nothing but what is in blocks, so they share their memory.
        self._pool = torch.cuda.graph_pool_handle() if self.is_gpu else None

    def allocate(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        array = DeviceArray(0, tuple(shape), dtype)
        with self._checked():
            block = torch.zeros(array.nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)
            start = block.data_ptr()
            index = bisect_right(self._addresses, start)
            self._addresses.insert(index, start)
            self._blocks.insert(index, block)
        return DeviceArray(-(-start // ALIGNMENT) * ALIGNMENT, array.shape, dtype)

    def host_array(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        """Zeros in memory of the host that the device can reach; bfloat16 comes as its bits in uint16."""
        size = math.prod(shape) * ITEM_SIZES[dtype]
        with self._checked():
            try:
                memory = torch.zeros(size, dtype=torch.uint8, pin_memory=self.is_gpu)
            except RuntimeError as error:
                # torch has no error of its own for pinned memory.
                if "out of memory" not in str(error):
                    raise
                reason = str(error).partition("\n")[0]
                raise pinned_memory_error(reason, size) from error
        self._host_memory.append(memory)
        return memory.numpy().view("uint16" if dtype == "bfloat16" else dtype).reshape(shape)

    def upload(self, source: NDArray[Any], target: DeviceArray) -> None:
        host = self._bytes_of_host(source, target)
        with self._checked():
            self._bytes(target).copy_(host, non_blocking=True)

    def download(self, source: DeviceArray, target: NDArray[Any]) -> None:
        host = self._bytes_of_host(target, source)
        with self._checked():
            host.copy_(self._bytes(source), non_blocking=True)

    def clear(self, array: DeviceArray) -> None:
        with self._checked():
            self._bytes(array).zero_()

    def copy(self, source: DeviceArray, target: DeviceArray) -> None:
        if source.nbytes > target.nbytes:
            raise ValueError(f"{source.nbytes} bytes cannot be copied to an array of {target.nbytes}")
        with self._checked():
            self._bytes(target)[: source.nbytes].copy_(self._bytes(source))

    def copy_blocks(
        self, source: DeviceArray, target: DeviceArray, *, count: int, size: int, pitch: int
    ) -> None:
        if not count or not size:
            return
        if size > pitch or (count - 1) * pitch + size > min(source.nbytes, target.nbytes):
            raise ValueError(f"{count} blocks of {size} bytes, {pitch} bytes apart, do not fit the arrays")
        with self._checked():
            rows = [self._bytes(each)[: (count - 1) * pitch + size] for each in (source, target)]
            old, new = (each.as_strided((count, size), (pitch, 1)) for each in rows)
            new.copy_(old)

    def capture(self, work: Launch) -> Launch:
        """Record what ``work`` puts on the stream. It must not upload from or download to arrays that are
        not of ``host_array``, and its engines must have run in the same shapes before."""
        if self._stream is None:
            return work
        graph = torch.cuda.CUDAGraph()
        with (
            _CAPTURES,
            self._checked(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            work()
        self._graphs.append((graph, work))
        return partial(self.put_work, graph.replay)

    def put_work(self, work: Callable[[], Any]) -> None:
        """Call a function of torch that puts work on the stream."""
        with self._checked():
            work()

    def mark(self) -> Any:
        if self._stream is None:
            return perf_counter()
        with self._checked():
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
        return event

    def milliseconds(self, first: Any, second: Any) -> float:
        if self._stream is None:
            return float(1e3 * (second - first))
        with self._checked():
            return float(first.elapsed_time(second))

    def synchronize(self) -> None:
        with self._checked():
            if self._stream is not None:
                self._stream.synchronize()
        self._held.clear()

    def close(self) -> None:
        """Wait, and free everything. Raises DeviceError if the last work failed, after freeing all."""
        closed = f"{self.name} is closed"
        if self._failure == closed:
            return
        try:
            if self._failure is None:
                self.synchronize()
        finally:
            for release in reversed(self._at_close):
                release()
            for kept in (
                self._at_close,
                self._graphs,
                self._addresses,
                self._blocks,
                self._host_memory,
                self._held,
            ):
                kept.clear()
            self._failure = closed
            if self.is_gpu:
                with contextlib.suppress(RuntimeError):
                    torch.cuda.empty_cache()

    @property
    def stream(self) -> int:
        assert self._stream is not None
        return int(self._stream.cuda_stream)

    def select(self) -> None:
        with self._checked():
            pass

    def fail(self, reason: str) -> DeviceError:
        self._failure = f"{self.name} is unusable since {reason}"
        return DeviceError(reason)

    def at_close(self, release: Callable[[], Any]) -> None:
        self._at_close.append(release)

    def prepared(self) -> None:
        """As ``Gpu.prepared``; nothing is compiled."""

    def free_memory(self) -> tuple[int, int]:
        with self._checked():
            free, total = torch.cuda.mem_get_info(self._device)
        return free, total

    def put(self, value: Tensor, convert: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A constant in the device's memory, or what ``convert`` makes of it there."""
        with self._checked():
            there = value.to(self._device).contiguous()
            return convert(there) if convert else there

    def tensor(self, array: DeviceArray) -> Tensor:
        """The memory of an array as a tensor. Raises ValueError for memory that is not the device's."""
        return self._bytes(array).view(TYPES[array.dtype]).view(array.shape)

    def _bytes(self, array: DeviceArray) -> Tensor:
        index = bisect_right(self._addresses, array.address) - 1
        if index >= 0:
            start = array.address - self._addresses[index]
            if start + array.nbytes <= self._blocks[index].numel():
                return self._blocks[index][start : start + array.nbytes]
        raise ValueError(f"{array} is not in memory of {self.name}")

    def _bytes_of_host(self, host: NDArray[Any], array: DeviceArray) -> Tensor:
        if host.nbytes != array.nbytes or not host.flags.c_contiguous:
            raise ValueError(
                f"a copy needs a host array without gaps of {array.nbytes} bytes, got {host.nbytes} bytes"
            )
        # torch has no tensors of memory that must not change.
        host = host if host.flags.writeable else host.copy()
        self._held.append(host)
        return torch.from_numpy(host.reshape(-1).view(np.uint8))

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """Makes the device the calling thread's, and errors of torch those of the device."""
        if self._failure is not None:
            raise DeviceError(self._failure)
        try:
            # Another device of this thread, or other code, may have set its own stream meanwhile.
            if self._stream is not None and (
                torch.cuda.current_device() != self.index or torch.cuda.current_stream() != self._stream
            ):
                torch.cuda.set_device(self._device)
                torch.cuda.set_stream(self._stream)
            yield
        except RuntimeError as error:
            if isinstance(error, DeviceError):
                raise
            # torch has no error of its own for memory of the CPU.
            if isinstance(error, torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise DeviceMemoryError(
                    f"{error}; smaller max_length, max_num_seqs or max_nodes need less"
                ) from error
            if self.is_gpu:
                self._failure = f"{self.name} is unusable since {error}"
            raise DeviceError(f"{self.name}: {error}") from error


def open_torch_device(name: str | None, num_threads: int | None) -> TorchDevice:
    """``cpu``, or a GPU as ``cuda:0``, by default the first.

    num_threads: of the CPU, for all of torch in this process
    Raises RequestError for another name, and DeviceError where that GPU is missing.
    """
    name = name or "cuda:0"
    if name == CPU:
        if num_threads:
            torch.set_num_threads(num_threads)
        return TorchDevice(CPU)
    index = check_device_name(name)
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{name}: torch {torch.__version__} finds no GPU on this machine; "
            "ctc generate --device cpu runs it here"
        )
    if index >= torch.cuda.device_count():
        raise DeviceError(f"{name}: this machine has {torch.cuda.device_count()} GPUs, counted from cuda:0")
    return TorchDevice(f"cuda:{index}")
