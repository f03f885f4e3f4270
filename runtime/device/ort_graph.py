"""ONNX Runtime as an engine of the graph step: a session bound to a device's addresses."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime.core.bundle import GraphSpec
from runtime.core.errors import BundleError, DeviceError, RequestError
from runtime.device.cuda_device import CudaDevice
from runtime.device.device import DeviceArray
from runtime.engines.ort import check_names, session_options
from runtime.engines.ort_wheel import ort

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "bool": np.bool_}


CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
# A pass only puts its work on the stream, and does not wait for it.
WITHOUT_WAITING = ("disable_synchronize_execution_providers", "1")


def check_cuda_provider() -> None:
    """Raises RequestError if the ONNX Runtime that is installed runs on no GPU."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise RequestError(
            "device: the ONNX Runtime that is installed runs on no GPU; pip install -c constraints.txt "
            "-e '.[gpu]' brings one that does"
        )


@functools.cache
def preload_cuda_libraries() -> None:
    """Load CUDA and cuDNN from their packages, where the provider would not look for them by itself."""
    if hasattr(ort, "preload_dlls"):
        # What it cannot find it prints, and standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()


class OrtGraph:
    """A ``DeviceEngine`` of ONNX Runtime.

    On the CPU, with the memory of a ``HostDevice``, it computes what a compiled engine computes, from the
    same graph, so it is the reference for one. On a GPU ONNX Runtime captures a CUDA graph of each binding
    by itself, in its first passes, so the step must not be captured a second time around it. It refuses to do
    so for a graph that computes anything but shapes on the CPU.
    exact: as for ``OrtEngine``
    gpu: on whose memory and stream it works; by default it works on the CPU
    Raises BundleError for a graph that cannot be loaded, and DeviceError if it would not run on the GPU.
    """

    def __init__(
        self,
        path: Path,
        contract: GraphSpec,
        *,
        exact: bool,
        num_threads: int | None = None,
        gpu: CudaDevice | None = None,
    ):
        options = session_options(exact, num_threads)
        providers: list[Any] = [CPU_PROVIDER]
        if gpu:
            preload_cuda_libraries()
            gpu.select()
            settings = {"device_id": gpu.index, "user_compute_stream": gpu.stream, "enable_cuda_graph": 1}
            # By default products in float32 would be rounded to ten bits.
            settings["use_tf32"] = 0
            providers = [(CUDA_PROVIDER, {name: str(value) for name, value in settings.items()})]
        try:
            # By default it would try again on the CPU if it failed on the GPU.
            self._session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        if gpu and CUDA_PROVIDER not in self._session.get_providers():
            raise DeviceError(
                f"{path.name}: ONNX Runtime {ort.__version__} could not start its CUDA provider, and would "
                "run on the CPU; pip install -c constraints.txt -e '.[gpu]' brings the libraries it needs"
            )
        check_names(self._session, path.name, contract)
        self._name = path.name
        self._inputs = [tensor.name for tensor in contract.inputs]
        self._outputs = [tensor.name for tensor in contract.outputs]
        self._gpu = gpu
        self._captures = itertools.count(1)

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        return self._pass(arrays, next(self._captures))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        # This number means that nothing is captured.
        self._pass(arrays, -1)()

    def _pass(self, arrays: Mapping[str, DeviceArray], capture: int) -> Callable[[], None]:
        binding, gpu = self._session.io_binding(), self._gpu
        memory, index = ("cuda", gpu.index) if gpu else ("cpu", 0)
        for names, bind in ((self._inputs, binding.bind_input), (self._outputs, binding.bind_output)):
            for name in names:
                array = arrays[name]
                bind(name, memory, index, NUMPY_TYPES[array.dtype], array.shape, array.address)
        if gpu is None:
            return lambda: self._session.run_with_iobinding(binding)
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(capture))
        options.add_run_config_entry(*WITHOUT_WAITING)
        return functools.partial(self._run_on_gpu, gpu, binding, options)

    def _run_on_gpu(self, gpu: CudaDevice, binding: Any, options: Any) -> None:
        gpu.select()
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            # What the pass has done of its work is unknown.
            raise gpu.fail(f"{self._name}: ONNX Runtime failed in a pass: {error}") from error
