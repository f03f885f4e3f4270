"""Compare compiled engines with the reference that their ONNX files were checked with, on a GPU."""

import importlib
from typing import Any

import numpy as np

from export.checks.graph_runner import GraphRunner, Tensors
from export.errors import ExportError
from export.pipeline import CheckedGraph
from export.precision import NUMPY_TYPES
from export.trt.device import Device, capability_of_gpu, open_device
from export.trt.library import Library
from runtime.bundle import EngineProfile, GraphSpec


def load_cudart() -> Any | None:
    """The CUDA runtime's bindings, if they are installed."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None


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
    library: Library, cudart: Any, plan: memoryview, graph: CheckedGraph, profiles: tuple[EngineProfile, ...]
) -> dict[str, float]:
    """The differences of an engine from PyTorch. Raises ExportError if they are too large."""
    with open_device(cudart) as device:
        engine = CompiledGraph(library, device, plan, graph.written.contract, profiles)
        return graph.check(GraphRunner(engine, graph.written.contract, graph.written.precision))


class CompiledGraph:
    """Runs passes of an engine from and to host memory, with its caches updated in place on the device."""

    def __init__(
        self,
        library: Library,
        device: Device,
        plan: memoryview,
        contract: GraphSpec,
        profiles: tuple[EngineProfile, ...],
    ):
        runtime = library.trt.Runtime(library.log)
        self._engine = runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise ExportError(f"{library.name} cannot load the engine that it has built")
        self._context = self._engine.create_execution_context()
        self._device = device
        self._contract = contract
        self._profiles = profiles

    def __call__(self, inputs: Tensors) -> Tensors:
        axes = self._axes(inputs)
        context, stream = self._context, self._device.stream
        if not context.set_optimization_profile_async(self._profile(axes), stream):
            raise ExportError("the engine refuses its own optimisation profile")
        for tensor in self._contract.inputs:
            array = np.ascontiguousarray(inputs[tensor.name])
            context.set_tensor_address(tensor.name, self._device.upload(tensor.name, array))
            if not context.set_input_shape(tensor.name, array.shape):
                raise ExportError(f"the engine refuses {tensor.name} of the shape {array.shape}")
        outputs: Tensors = {}
        buffers: dict[str, str] = {}
        for tensor in self._contract.outputs:
            dtype = NUMPY_TYPES.get(tensor.dtype) or np.dtype(tensor.dtype)
            outputs[tensor.name] = np.zeros(tuple(context.get_tensor_shape(tensor.name)), dtype)
            # A cache is updated in place: its output is the memory of its input.
            buffers[tensor.name] = tensor.name.replace("present_", "past_")
            address = self._device.reserve(buffers[tensor.name], outputs[tensor.name].nbytes)
            context.set_tensor_address(tensor.name, address)
        if not context.execute_async_v3(stream):
            raise ExportError("the engine cannot be run")
        self._device.synchronize()
        for name, array in outputs.items():
            self._device.download(buffers[name], array)
        return outputs

    def _axes(self, inputs: Tensors) -> dict[str, int]:
        return {
            axis: size
            for tensor in self._contract.inputs
            for axis, size in zip(tensor.shape, inputs[tensor.name].shape, strict=True)
            if isinstance(axis, str)
        }

    def _profile(self, axes: dict[str, int]) -> int:
        """The first profile that takes these sizes."""
        for index, profile in enumerate(self._profiles):
            if all(profile[axis][0] <= size <= profile[axis][2] for axis, size in axes.items()):
                return index
        raise ExportError(f"no optimisation profile takes {axes}")
