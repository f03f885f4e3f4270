"""A stand-in for the CUDA runtime and TensorRT's runtime whose device memory is host memory.

A plan is the path of an ONNX file, which ONNX Runtime runs at the addresses that the caller sets. What a
driver would refuse or corrupt is an error here: memory that was freed or is too small, a copy on the default
stream, a tensor without an address, a shape outside the profile.
"""

import ctypes
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from runtime.bundle import EngineProfile, GraphSpec


class FakeCudart:
    """The functions of ``cuda.bindings.runtime`` that are called; ``memory``: bytes of the device."""

    class cudaError_t(IntEnum):
        cudaSuccess = 0
        cudaErrorMemoryAllocation = 2

    class cudaMemcpyKind(Enum):
        cudaMemcpyHostToDevice = 1
        cudaMemcpyDeviceToHost = 2

    class cudaDeviceAttr(Enum):
        cudaDevAttrComputeCapabilityMajor = 75
        cudaDevAttrComputeCapabilityMinor = 76

    def __init__(self, memory: int = 2**30, capability: tuple[int, int] = (8, 9)):
        self.memory = memory
        self.capability = capability
        self.blocks: dict[int, Any] = {}
        self.streams: set[int] = set()

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return 0, 1

    def cudaDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[int, int]:
        major = attribute is self.cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor
        return 0, self.capability[0 if major else 1]

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return 0, b"out of memory" if error == 2 else b"unknown"

    def cudaStreamCreate(self) -> tuple[int, int]:
        self.streams.add(1 + len(self.streams))
        return 0, len(self.streams)

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.remove(stream)
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        assert stream in self.streams
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        if sum(map(ctypes.sizeof, self.blocks.values())) + size > self.memory:
            return 2, 0
        block = (ctypes.c_ubyte * size)()
        self.blocks[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.blocks[address]
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, count: int, kind: Any, stream: int) -> tuple[int]:
        assert stream in self.streams, "a copy on the default stream"
        is_upload = kind is self.cudaMemcpyKind.cudaMemcpyHostToDevice
        assert count <= ctypes.sizeof(self.blocks[to if is_upload else source])
        ctypes.memmove(to, source, count)
        return (0,)


class FakeTensorRT:
    """The runtime half of ``tensorrt``: engines for one contract and its profiles."""

    __version__ = "0"

    def __init__(self, cudart: FakeCudart, contract: GraphSpec, profiles: tuple[EngineProfile, ...]):
        self.cudart, self.contract, self.profiles = cudart, contract, profiles

    def Runtime(self, log: Any) -> "FakeTensorRT":
        return self

    def deserialize_cuda_engine(self, plan: memoryview) -> "FakeEngine | None":
        path = Path(bytes(plan).decode())
        return FakeEngine(self, path) if path.is_file() else None


class FakeEngine:
    def __init__(self, library: FakeTensorRT, path: Path):
        self.library = library
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(path, options)

    def create_execution_context(self) -> "FakeContext":
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine):
        self._engine, self._library = engine, engine.library
        self._profile: EngineProfile = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._axes: dict[str, int] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream in self._library.cudart.streams
        self._profile = self._library.profiles[index]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        (tensor,) = [each for each in self._library.contract.inputs if each.name == name]
        for axis, size in zip(tensor.shape, shape, strict=True):
            least, _, most = (axis, axis, axis) if isinstance(axis, int) else self._profile[axis]
            if not least <= size <= most:
                return False
            self._axes |= {} if isinstance(axis, int) else {axis: size}
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        (tensor,) = [each for each in self._library.contract.outputs if each.name == name]
        return tuple(axis if isinstance(axis, int) else self._axes[axis] for axis in tensor.shape)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert stream in self._library.cudart.streams
        contract = self._library.contract
        feeds = {t.name: self._at(t.name, self._shapes[t.name], t.dtype).copy() for t in contract.inputs}
        names = [tensor.name for tensor in contract.outputs]
        for tensor, value in zip(contract.outputs, self._engine.session.run(names, feeds), strict=True):
            self._at(tensor.name, value.shape, tensor.dtype)[...] = value
        return True

    def _at(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        block = self._library.cudart.blocks[self._addresses[name]]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert size <= ctypes.sizeof(block), f"{name} reaches beyond its memory"
        return np.frombuffer(block, np.uint8, size).view(dtype).reshape(shape)
