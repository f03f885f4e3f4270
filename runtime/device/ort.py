"""ONNX Runtime as the engines of the graph step, on a CPU or a GPU: sessions bound to addresses."""

import contextlib
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runtime.core.bundle import Bundle, GraphSpec
from runtime.core.errors import BundleError, DeviceError, RequestError
from runtime.device.cuda import CudaDevice, check_device_name, open_cuda_device
from runtime.device.device import CPU, Device, DeviceArray, DeviceEngine, HostDevice, Launch, MakeEngine
from runtime.engines.ort import SUFFIX, check_names, session_options
from runtime.engines.ort_wheel import ort

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "bool": np.bool_}
CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
# What the driver has to be made for, in the driver's way of counting.
CUDA_VERSION = 13000
# A pass puts its work on the stream and does not wait for it.
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
    """Load CUDA and cuDNN from their Python packages, where the provider does not look for them by itself."""
    if hasattr(ort, "preload_dlls"):
        # It prints which libraries are missing, and standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()


def _cause(gpu: CudaDevice) -> str:
    """Why the provider may not start: an old driver, or libraries that are missing."""
    version = gpu.driver_version()
    if version < CUDA_VERSION:
        return (
            f"the driver is made for CUDA {version // 1000}.{version % 1000 // 10}, and onnxruntime-gpu "
            "since 1.31 needs one for CUDA 13, which is 580 or later"
        )
    return "pip install -c constraints.txt -e '.[gpu]' brings the libraries it needs"


class OrtGraph:
    """A ``DeviceEngine`` of ONNX Runtime.

    On the CPU, with the memory of a ``HostDevice``, it is the reference for a compiled engine of the same
    graph. On a GPU its own capture is off: it would keep graphs by thread, and run a pass several times to
    make one. The step captures passes as those of any engine, after a first one in the same shapes.

    int8_products: as for ``OrtEngine``
    gpu: the device whose memory and stream it uses; by default it runs on the CPU
    Raises BundleError for a graph that cannot be loaded, and DeviceError if it would not run on the GPU.
    """

    def __init__(
        self,
        path: Path,
        contract: GraphSpec,
        *,
        int8_products: bool,
        num_threads: int | None = None,
        gpu: CudaDevice | None = None,
    ):
        options = session_options(num_threads, int8_products=int8_products)
        providers: list[Any] = [CPU_PROVIDER]
        if gpu:
            preload_cuda_libraries()
            gpu.select()
            settings: dict[str, Any] = {"device_id": gpu.index, "user_compute_stream": gpu.stream}
            # Otherwise the memory for intermediate results would grow in powers of two.
            settings["arena_extend_strategy"] = "kSameAsRequested"
            # By default the factors of float32 products would be rounded to mantissas of ten bits.
            settings["use_tf32"] = 0
            providers = [(CUDA_PROVIDER, {name: str(value) for name, value in settings.items()})]
        try:
            # By default a session that fails on the GPU would be tried on the CPU.
            self._session = ort.InferenceSession(path, options, providers=providers, enable_fallback=0)
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        if gpu and CUDA_PROVIDER not in self._session.get_providers():
            raise DeviceError(
                f"{path.name}: ONNX Runtime {ort.__version__} could not start its CUDA provider, and would "
                f"run on the CPU; {_cause(gpu)}"
            )
        check_names(self._session, path.name, contract)
        self._name = path.name
        self._inputs = [tensor.name for tensor in contract.inputs]
        self._outputs = [tensor.name for tensor in contract.outputs]
        self._gpu = gpu

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Launch:
        binding, gpu = self._session.io_binding(), self._gpu
        memory, index = ("cuda", gpu.index) if gpu else ("cpu", 0)
        for names, bind in ((self._inputs, binding.bind_input), (self._outputs, binding.bind_output)):
            for name in names:
                array = arrays[name]
                bind(name, memory, index, NUMPY_TYPES[array.dtype], array.shape, array.address)
        if gpu is None:
            return lambda: self._session.run_with_iobinding(binding)
        options = ort.RunOptions()
        options.add_run_config_entry(*WITHOUT_WAITING)
        return functools.partial(self._run_on_gpu, gpu, binding, options)

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        self.bind(arrays)()

    def _run_on_gpu(self, gpu: CudaDevice, binding: Any, options: Any) -> None:
        gpu.select()
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:
            # It is unknown which part of its work the pass has done.
            raise gpu.fail(f"{self._name}: ONNX Runtime failed in a pass: {error}") from error


def open_ort(bundle: Bundle, device: str | None, num_threads: int | None) -> tuple[Device, MakeEngine]:
    """Open the CPU, or a GPU, for a bundle of ``onnxruntime``. As ``runtime.device.device.OpenDevice``."""
    gpu = None
    if device not in (None, CPU):
        check_device_name(device)
        check_cuda_provider()
        gpu = open_cuda_device(device)

    def make(name: str) -> DeviceEngine:
        path, contract = bundle.path / f"{name}{SUFFIX}", bundle.manifest.graphs[name]
        return OrtGraph(path, contract, int8_products=name == "drafter", num_threads=num_threads, gpu=gpu)

    return gpu or HostDevice(), make
