"""Compare compiled engines with the reference that their ONNX files were checked with, on a GPU."""

from typing import Any

import numpy as np

from export.errors import ExportError
from export.forms import GraphFile
from export.precision import NUMPY_TYPES
from export.trt.library import Library
from export.verify.graph_runner import GraphRunner, Tensors
from runtime.core.bundle import EngineProfile, GraphSpec, TensorSpec
from runtime.core.errors import DeviceError
from runtime.device.cuda import CudaDevice, capability_of_gpu
from runtime.device.device import Device, DeviceArray, DeviceEngine
from runtime.device.tensorrt import TensorRTEngine


def why_not_run(library: Library, capabilities: tuple[str, ...], cudart: Any | None) -> str | None:
    """The reason that engines cannot be run on this machine; None if they can."""
    if cudart is None:
        return "cuda-bindings is not installed"
    gpu = capability_of_gpu(cudart)
    if gpu is None:
        return "this machine has no GPU"
    if library.compiles_ahead and gpu not in capabilities:
        return f"they were compiled for {', '.join(capabilities)}, and this machine's GPU is {gpu}"
    return None


def check_engine(
    library: Library, cudart: Any, plan: bytes, file: GraphFile, profiles: tuple[EngineProfile, ...]
) -> dict[str, float]:
    """The differences of an engine from PyTorch.

    Raises ExportError if they are too large or the engine cannot be run.
    """
    contract = file.written.contract
    try:
        device = CudaDevice(cudart)
        try:
            name = file.written.path.stem
            engine = TensorRTEngine(library.trt, library.log, device, plan, contract, profiles, name=name)
            compiled = CompiledGraph(engine, device, contract)
            return file.check(GraphRunner(compiled, contract, file.written.precision))
        finally:
            device.close()
    except DeviceError as error:
        raise ExportError(str(error)) from error


class CompiledGraph:
    """Runs passes of an engine from and to host memory, with its caches updated in place on the device."""

    def __init__(self, engine: DeviceEngine, device: Device, contract: GraphSpec):
        self._engine = engine
        self._device = device
        self._contract = contract
        self._memory: dict[str, DeviceArray] = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        arrays: dict[str, DeviceArray] = {}
        sizes: dict[str, int] = {}
        for tensor in self._contract.inputs:
            given = np.ascontiguousarray(inputs[tensor.name])
            axes = zip(tensor.shape, given.shape, strict=True)
            sizes.update((axis, size) for axis, size in axes if isinstance(axis, str))
            arrays[tensor.name] = self._array(tensor, given.shape)
            self._device.upload(given, arrays[tensor.name])
        sizes = with_output_axes(sizes)
        outputs: Tensors = {}
        for tensor in self._contract.outputs:
            shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
            outputs[tensor.name] = np.zeros(shape, NUMPY_TYPES.get(tensor.dtype) or np.dtype(tensor.dtype))
            past = tensor.name.replace("present_", "past_")
            arrays[tensor.name] = arrays[past] if past in arrays else self._array(tensor, shape)
        self._engine.run(arrays)
        for name, array in outputs.items():
            self._device.download(arrays[name], array)
        self._device.synchronize()
        return outputs

    def _array(self, tensor: TensorSpec, shape: tuple[int, ...]) -> DeviceArray:
        """Memory of a tensor, which the passes share whose shapes fit."""
        wanted = DeviceArray(0, shape, tensor.dtype)
        memory = self._memory.get(tensor.name)
        if memory is None or memory.nbytes < wanted.nbytes:
            memory = self._device.allocate(shape, tensor.dtype)
            self._memory[tensor.name] = memory
        return memory.view(shape)


def with_output_axes(sizes: dict[str, int]) -> dict[str, int]:
    """With the axes that only outputs of autoregressive heads' graphs have."""
    # EAGLE has children of every state, Hydra of every path.
    nodes = sum(size for axis, size in sizes.items() if axis[0] == "M" and axis[1:].isdigit())
    return {"M": sizes.get("P", nodes), "L1": sizes.get("L", 0) + 1, **sizes}
