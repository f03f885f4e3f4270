"""A GPU as a device, on a stand-in for the driver whose memory is the host's."""

import inspect
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest

from runtime.core.errors import DeviceError, DeviceMemoryError, RequestError
from runtime.device import cuda
from runtime.device.cuda import CudaDevice, capability_of_gpu, load_cudart, open_cuda_device
from runtime.device.device import Device, DeviceArray
from tests.device_of_memory import FakeCudart, Fault


@pytest.fixture
def cudart() -> FakeCudart:
    return FakeCudart()


@pytest.fixture
def device(cudart: FakeCudart) -> CudaDevice:
    return CudaDevice(cudart)


def on_device(device: Device, values: list[float]) -> DeviceArray:
    array = device.allocate((len(values),), "float32")
    device.upload(np.array(values, np.float32), array)
    return array


def read(device: Device, array: DeviceArray) -> list[float]:
    host = device.host_array(array.shape, array.dtype)
    device.download(array, host)
    device.synchronize()
    return list(host.tolist())


def test_memory_is_zero_and_copies_arrive(device: CudaDevice) -> None:
    zeros = device.allocate((2, 3), "int64")
    assert read(device, zeros) == [[0, 0, 0], [0, 0, 0]]
    source = on_device(device, [1, 2, 3, 4, 5, 6])
    assert read(device, source) == [1, 2, 3, 4, 5, 6]
    target = device.allocate((8,), "float32")
    device.copy(source.rows(2, 5), target.rows(1, 8))
    assert read(device, target) == [0, 3, 4, 5, 0, 0, 0, 0]
    device.copy_blocks(source, target.rows(0, 6), count=2, size=4, pitch=12)
    assert read(device, target) == [1, 3, 4, 4, 0, 0, 0, 0]
    device.clear(target.rows(1, 3))
    assert read(device, target) == [1, 0, 0, 4, 0, 0, 0, 0]
    device.clear(device.allocate((0, 3), "float16"))
    assert device.allocate((0, 3), "float16").address


def test_host_arrays_are_zeros_of_their_type(device: CudaDevice) -> None:
    for dtype, expected in (("float16", "float16"), ("bool", "bool"), ("bfloat16", "uint16")):
        array = device.host_array((2, 3), dtype)
        assert array.shape == (2, 3)
        assert array.dtype == expected
        assert not array.any()
    assert device.host_array((0, 3), "float32").shape == (0, 3)


def test_nothing_is_there_before_synchronize(device: CudaDevice) -> None:
    source = device.host_array((2,), "float32")
    array, result = device.allocate((2,), "float32"), device.host_array((2,), "float32")
    source[:] = 1
    device.upload(source, array)
    device.download(array, result)
    assert result.tolist() == [0, 0]
    # A pinned source is read when the copy is done, so a change that comes too early is seen.
    source[:] = 2
    device.synchronize()
    assert result.tolist() == [2, 2]
    # One that is not pinned is read at once.
    pageable = np.array([3, 3], np.float32)
    device.upload(pageable, array)
    pageable[:] = 4
    assert read(device, array) == [3, 3]


def test_a_copy_outlives_the_array_it_reads_or_fills(device: CudaDevice) -> None:
    array = device.allocate((1000,), "float32")
    device.upload(np.full(1000, 7, np.float32), array)
    target = np.zeros(1000, np.float32)
    device.download(array, target)
    held = [id(each) for each in device._held]
    assert id(target) in held
    device.synchronize()
    assert device._held == []
    assert set(target.tolist()) == {7}


def test_copies_that_do_not_fit_are_refused(device: CudaDevice) -> None:
    array, large = device.allocate((4,), "float32"), device.allocate((8,), "float32")
    with pytest.raises(ValueError, match="16 bytes, got 12 bytes"):
        device.upload(np.zeros(3, np.float32), array)
    with pytest.raises(ValueError, match="without gaps"):
        device.download(array, np.zeros(8, np.float32)[::2])
    with pytest.raises(ValueError, match="32 bytes cannot be copied to an array of 16"):
        device.copy(large, array)
    for size, pitch in ((8, 12), (8, 4)):
        with pytest.raises(ValueError, match="2 blocks of 8 bytes"):
            device.copy_blocks(array, large, count=2, size=size, pitch=pitch)


def test_a_graph_does_what_the_work_does(device: CudaDevice) -> None:
    pinned, result = device.host_array((3,), "float32"), device.host_array((3,), "float32")
    first, second = device.allocate((3,), "float32"), device.allocate((3,), "float32")

    def work() -> None:
        device.copy(first, second)
        device.upload(pinned, first)
        device.download(second, result)

    launch = device.capture(work)
    pinned[:] = [1, 2, 3]
    device.synchronize()
    assert read(device, first) == [0, 0, 0]  # recorded, not done
    launch()
    device.synchronize()
    assert result.tolist() == [0, 0, 0]
    pinned[:] = [4, 5, 6]
    launch()
    device.synchronize()
    assert result.tolist() == [1, 2, 3]
    assert read(device, first) == [4, 5, 6]
    work()
    device.synchronize()
    assert result.tolist() == [4, 5, 6]


def test_work_that_fails_leaves_no_recording_behind(cudart: FakeCudart, device: CudaDevice) -> None:
    array = on_device(device, [1, 2])

    def work() -> None:
        device.copy(array.rows(0, 1), array.rows(1, 2))
        raise KeyError("of the caller")

    with pytest.raises(KeyError):
        device.capture(work)
    assert read(device, array) == [1, 2]
    device.close()
    assert cudart.leftovers() == []


def test_every_call_selects_the_gpu(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = threading.local()

    def select(self: FakeCudart, device: int) -> tuple[int]:
        chosen.gpu = device
        return (0,)

    def use() -> None:
        device.synchronize()
        found.append(chosen.gpu)

    found: list[int] = []
    monkeypatch.setattr(FakeCudart, "cudaSetDevice", select)
    use()
    chosen.gpu = 3  # other code of this thread
    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [device.index] * 3
    monkeypatch.undo()
    with pytest.raises(DeviceError, match="cudaSetDevice: error 101"):
        CudaDevice(FakeCudart(), 1)


def test_time_between_events(cudart: FakeCudart, device: CudaDevice) -> None:
    first = device.mark()
    array = on_device(device, [1])
    second = device.mark()
    with pytest.raises(DeviceError, match="cudaEventElapsedTime: device not ready"):
        device.milliseconds(first, second)
    device.synchronize()
    assert device.milliseconds(first, second) > 0
    del first, second
    for _ in range(5):
        mark = device.mark()
    assert mark is not None
    assert len(cudart.events) == 2
    assert read(device, array) == [1]


def test_close_frees_everything(cudart: FakeCudart, device: CudaDevice) -> None:
    array = on_device(device, [1, 2])
    device.host_array((3,), "int64")
    device.mark()
    launch = device.capture(lambda: device.copy(array.rows(0, 1), array.rows(1, 2)))
    launch()
    device.close()
    device.close()
    assert cudart.leftovers() == []
    for call in (launch, device.synchronize, device.mark):
        with pytest.raises(DeviceError, match="cuda:0 is closed"):
            call()


def test_too_little_memory_names_what_was_wanted() -> None:
    device = CudaDevice(FakeCudart(memory=1000))
    device.allocate((100,), "float32")
    with pytest.raises(
        DeviceError,
        match="cudaMalloc: out of memory: 800 bytes wanted, 600 of the GPU's 1000 bytes are free; smaller "
        "max_length, max_num_seqs or max_nodes need less",
    ):
        device.allocate((200,), "float32")
    assert read(device, on_device(device, [3])) == [3]  # it stays usable


def test_too_little_pinned_memory_names_what_was_wanted(cudart: FakeCudart, device: CudaDevice) -> None:
    cudart.fail_next("cudaHostAlloc", 2)
    with pytest.raises(
        DeviceMemoryError,
        match=r"^cudaHostAlloc: out of memory: 80 bytes of the host's memory wanted, .* smaller max_num_seqs "
        r"or max_nodes need less, and a limit of locked memory \(ulimit -l\) may be low$",
    ):
        device.host_array((10,), "int64")
    assert read(device, on_device(device, [3])) == [3]


def test_free_memory_that_the_driver_does_not_tell(cudart: FakeCudart, device: CudaDevice) -> None:
    cudart.fail_next("cudaMemGetInfo", 999)
    with pytest.raises(DeviceError, match=r"^cudaMemGetInfo: error 999$"):
        device.free_memory()
    # A message about something else does without it.
    cudart.fail_next("cudaMalloc", 2)
    cudart.fail_next("cudaMemGetInfo", 999)
    message = r"8 bytes wanted, what is free is unknown \(cudaMemGetInfo: error 999\); smaller"
    with pytest.raises(DeviceMemoryError, match=message):
        device.allocate((1,), "int64")


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cudaMemcpyAsync", lambda device, array, launch: device.copy(array.rows(0, 1), array.rows(1, 2))),
        ("cudaMemsetAsync", lambda device, array, launch: device.allocate((1,), "bool")),
        ("cudaMemcpyAsync", lambda device, array, launch: device.upload(np.ones(2, np.float32), array)),
        (
            "cudaMemcpy2DAsync",
            lambda device, array, launch: device.copy_blocks(array, array, count=1, size=4, pitch=4),
        ),
        ("cudaGraphLaunch", lambda device, array, launch: launch()),
        ("cudaEventRecord", lambda device, array, launch: device.mark()),
        ("cudaStreamBeginCapture", lambda device, array, launch: device.capture(launch)),
        ("cudaStreamEndCapture", lambda device, array, launch: device.capture(lambda: None)),
        ("cudaGraphInstantiate", lambda device, array, launch: device.capture(lambda: None)),
        ("cudaStreamSynchronize", lambda device, array, launch: device.synchronize()),
    ],
)
@pytest.mark.parametrize("error", [700, 999])
def test_a_failed_device_stays_unusable(
    function: str, call: Callable[[CudaDevice, DeviceArray, Callable[[], None]], None], error: int
) -> None:
    cudart = FakeCudart()
    device = CudaDevice(cudart)
    array = on_device(device, [1, 2])
    host = device.host_array((2,), "float32")
    launch = device.capture(lambda: device.copy(array.rows(0, 1), array.rows(1, 2)))
    cudart.fail_next(function, error)
    reason = f"{function}: " + ("an illegal memory access was encountered" if error == 700 else "error 999")
    with pytest.raises(DeviceError, match=f"^{reason}$"):
        call(device, array, launch)
    later: list[Callable[[], Any]] = [
        device.synchronize,
        device.mark,
        launch,
        lambda: device.upload(host, array),
        lambda: device.allocate((1,), "bool"),
        lambda: device.host_array((1,), "bool"),
        lambda: device.capture(launch),
    ]
    for each in later:
        with pytest.raises(DeviceError, match=f"^cuda:0 is unusable since {reason}$"):
            each()
    device.close()
    # A driver that is dead frees nothing until the process ends.
    assert error == 700 or cudart.leftovers() == []
    assert CudaDevice(FakeCudart()).allocate((1,), "bool").address


def test_an_error_of_the_last_work_is_told_when_closing(cudart: FakeCudart, device: CudaDevice) -> None:
    on_device(device, [1])
    cudart.fail_next("cudaStreamSynchronize", 999)
    with pytest.raises(DeviceError, match="cudaStreamSynchronize: error 999"):
        device.close()
    assert cudart.leftovers() == []


def test_devices_by_name(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_cudart", lambda: cudart)
    for name in ("cuda", "cuda:0"):
        opened: Device = open_cuda_device(name)
        opened.close()
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:0x"):
        with pytest.raises(RequestError, match="must be cpu, cuda:0, cuda:1 and so on, got"):
            open_cuda_device(name)
    with pytest.raises(DeviceError, match="cuda:3: this machine has 1 GPU"):
        open_cuda_device("cuda:3")
    assert capability_of_gpu(cudart) == "sm89"
    assert capability_of_gpu(cudart, 1) is None
    monkeypatch.setattr(FakeCudart, "cudaGetDeviceCount", lambda self: (35, None))
    assert capability_of_gpu(cudart) is None
    with pytest.raises(DeviceError, match="cuda:0: this machine has no GPU or no driver: error 35"):
        open_cuda_device("cuda:0")
    monkeypatch.setattr(cuda, "load_cudart", lambda: None)
    with pytest.raises(DeviceError, match=r"bindings are not installed; pip install .*tensorrt-rtx"):
        open_cuda_device("cuda:0")


def test_without_a_driver_there_is_one_line() -> None:
    cudart = load_cudart()
    if cudart is None or capability_of_gpu(cudart):
        pytest.skip("needs the bindings on a machine without a GPU")
    with pytest.raises(DeviceError, match="cuda:0: this machine has no GPU or no driver: "):
        open_cuda_device("cuda:0")


def test_the_stand_in_finds_wrong_addresses(cudart: FakeCudart, device: CudaDevice) -> None:
    array, other = on_device(device, [1, 2]), device.allocate((2,), "float32")
    host = device.host_array((2,), "float32")
    with pytest.raises(Fault, match="no block of device memory holds 0x10"):
        device.copy(DeviceArray(16, (1,), "float32"), array)
    with pytest.raises(Fault, match="no block of device memory"):
        device.copy(array, DeviceArray(host.ctypes.data, (2,), "float32"))
    with pytest.raises(Fault, match=r"8 bytes at .* reach beyond their block of 8 bytes"):
        device.copy(other, DeviceArray(array.address + 4, (2,), "float32"))
    with pytest.raises(Fault, match="the two sides of a copy overlap"):
        device.copy(array, DeviceArray(array.address + 4, (2,), "float32"))
    with pytest.raises(Fault, match="the two sides of a copy overlap"):
        device.copy_blocks(array, array, count=2, size=4, pitch=4)


def test_the_stand_in_finds_wrong_frees(cudart: FakeCudart, device: CudaDevice) -> None:
    array = on_device(device, [1, 2])
    with pytest.raises(Fault, match="memory is freed that work not yet done uses"):
        cudart.cudaFree(array.address)
    with pytest.raises(Fault, match="a stream is destroyed whose work is not done"):
        cudart.cudaStreamDestroy(device.stream)
    device.synchronize()
    with pytest.raises(Fault, match="is inside a block and cannot be freed"):
        cudart.cudaFree(array.address + 4)
    launch = device.capture(lambda: device.copy(array.rows(0, 1), array.rows(1, 2)))
    cudart.cudaFree(array.address)
    for use in (lambda: device.download(array, np.zeros(2, np.float32)), launch):
        with pytest.raises(Fault, match="is in memory that was freed"):
            use()
    with pytest.raises(Fault, match="is in memory that was freed"):
        cudart.cudaFree(array.address)


def test_the_stand_in_finds_wrong_streams(cudart: FakeCudart, device: CudaDevice) -> None:
    array = on_device(device, [1, 2])
    with pytest.raises(Fault, match="work on the default stream"):
        cudart.cudaMemsetAsync(array.address, 0, 1, 0)
    with pytest.raises(Fault, match="there is no stream 99"):
        cudart.cudaMemsetAsync(array.address, 0, 1, 99)
    with pytest.raises(Fault, match="the stream waits for the default stream"):
        cudart.cudaStreamCreateWithFlags(0)


def test_the_stand_in_finds_what_cannot_be_captured(cudart: FakeCudart, device: CudaDevice) -> None:
    array = on_device(device, [1, 2])
    forbidden: dict[str, Callable[[], Any]] = {
        "cudaMalloc while": lambda: device.allocate((1,), "bool"),
        "cudaHostAlloc while": lambda: device.host_array((1,), "bool"),
        "cudaFree while": lambda: cudart.cudaFree(array.address),
        "cudaStreamSynchronize while": device.synchronize,
        "cudaEventRecord while": device.mark,
        "memory that is not pinned is captured": lambda: device.upload(np.zeros(2, np.float32), array),
    }
    for message, work in forbidden.items():
        with pytest.raises(Fault, match=message):
            device.capture(work)
    launch = device.capture(lambda: None)
    for handle in list(cudart.executables):
        cudart.cudaGraphExecDestroy(handle)
    with pytest.raises(Fault, match="a graph is launched that was destroyed"):
        launch()


def test_the_stand_in_has_only_what_the_bindings_have() -> None:
    cudart = pytest.importorskip("cuda.bindings.runtime")
    functions = {n: f for n, f in vars(FakeCudart).items() if n.startswith("cuda") and inspect.isfunction(f)}
    assert len(functions) > 20
    for name, function in functions.items():
        real = inspect.signature(getattr(cudart, name)).parameters
        assert list(inspect.signature(function).parameters)[1:] == list(real), name
    for kind in vars(FakeCudart).values():
        if isinstance(kind, type):
            members = {member.name: member.value for member in kind}  # type: ignore[attr-defined]
            real = getattr(cudart, kind.__name__)
            assert {name: int(getattr(real, name)) for name in members} == members
    for name in ("cudaHostAllocDefault", "cudaStreamNonBlocking"):
        assert int(getattr(cudart, name)) == getattr(FakeCudart, name)


class Beside(FakeCudart):
    """A stand-in that makes every call to the real bindings too, which refuse it for want of a driver."""

    def __init__(self, real: Any):
        super().__init__()
        self.real = real
        self.called: set[str] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cuda") or not callable(found) or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            self.called.add(name)
            theirs = [
                getattr(getattr(self.real, type(a).__name__), a.name) if isinstance(a, Enum) else a
                for a in arguments
            ]
            refusal, result = getattr(self.real, name)(*theirs), found(*arguments)
            assert len(refusal) == len(result), name
            return result

        return call


def test_the_bindings_take_every_call_that_is_made() -> None:
    cudart = load_cudart()
    if cudart is None or capability_of_gpu(cudart):
        pytest.skip("needs the bindings on a machine without a GPU")
    beside = Beside(cudart)
    device = CudaDevice(beside)
    array = on_device(device, [1, 2, 3, 4])
    launch = device.capture(lambda: device.copy_blocks(array, array.rows(1, 4), count=1, size=4, pitch=8))
    launch()
    with pytest.raises(ValueError, match="cannot be copied"):
        device.capture(lambda: device.copy(array, array.rows(0, 1)))
    first, second = device.mark(), device.mark()
    assert read(device, array) == [1, 1, 3, 4]
    assert device.milliseconds(first, second) >= 0
    beside.fail_next("cudaMalloc", 2)
    with pytest.raises(DeviceError, match="out of memory"):
        device.allocate((1,), "bool")
    device.close()
    expected = {n for n, f in vars(FakeCudart).items() if n.startswith("cuda") and inspect.isfunction(f)}
    asked = {"cudaGetDeviceCount", "cudaDeviceGetAttribute", "cudaGetDeviceProperties"}
    asked |= {"cudaDriverGetVersion"}
    assert expected - beside.called == asked
