"""ONNX Runtime as an engine of the graph step: a session bound to a device's addresses."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle import GraphSpec
from runtime.engines.device import DeviceArray
from runtime.engines.ort import check_names, session_options
from runtime.engines.ort_wheel import ort
from runtime.errors import BundleError, RequestError

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "bool": np.bool_}


@dataclass(frozen=True)
class OrtPlace:
    """Where a session runs.

    provider, memory: ONNX Runtime's names of what computes, and of the memory it reads and writes
    index, stream: of a GPU, on whose stream all work is put
    """

    provider: str = "CPUExecutionProvider"
    memory: str = "cpu"
    index: int = 0
    stream: int = 0

    @property
    def providers(self) -> list[Any]:
        """As ``InferenceSession`` wants them. A graph that is captured must not fall back to the CPU."""
        if self.memory == "cpu":
            return [self.provider]
        settings = {"device_id": self.index, "user_compute_stream": self.stream, "enable_cuda_graph": 1}
        return [(self.provider, {name: str(value) for name, value in settings.items()})]


CPU_PLACE = OrtPlace()
CUDA_PROVIDER = "CUDAExecutionProvider"


def check_cuda_provider() -> None:
    """Raises RequestError if the ONNX Runtime that is installed runs on no GPU."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        raise RequestError(
            "device: the ONNX Runtime that is installed runs on no GPU; pip install -c constraints.txt "
            "-e '.[gpu]' brings one that does"
        )


class OrtGraph:
    """A ``DeviceEngine`` of ONNX Runtime.

    On the CPU, with the memory of a ``HostDevice``, it computes what a compiled engine computes, from the
    same graph, so it is the reference for one. On a GPU ONNX Runtime captures a CUDA graph of each binding
    by itself, in its first passes, so the step must not be captured a second time around it.
    exact: as for ``OrtEngine``
    """

    def __init__(
        self,
        path: Path,
        contract: GraphSpec,
        *,
        exact: bool,
        num_threads: int | None = None,
        place: OrtPlace = CPU_PLACE,
    ):
        options = session_options(exact, num_threads)
        try:
            self._session = ort.InferenceSession(path, options, providers=place.providers)
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        check_names(self._session, path.name, contract)
        self._inputs = [tensor.name for tensor in contract.inputs]
        self._outputs = [tensor.name for tensor in contract.outputs]
        self._place = place
        self._captures = itertools.count(1)

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        return self._pass(arrays, next(self._captures))

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        # This number means that nothing is captured.
        self._pass(arrays, -1)()

    def _pass(self, arrays: Mapping[str, DeviceArray], capture: int) -> Callable[[], None]:
        binding, place = self._session.io_binding(), self._place
        for names, bind in ((self._inputs, binding.bind_input), (self._outputs, binding.bind_output)):
            for name in names:
                array = arrays[name]
                bind(name, place.memory, place.index, NUMPY_TYPES[array.dtype], array.shape, array.address)
        if place.memory == "cpu":
            return lambda: self._session.run_with_iobinding(binding)
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(capture))
        return lambda: self._session.run_with_iobinding(binding, options)
