"""ONNX Runtime as an engine of the graph step: a session bound to a device's addresses."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from runtime.bundle import GraphSpec
from runtime.engines.device import DeviceArray
from runtime.engines.ort import check_names, session_options
from runtime.engines.ort_wheel import ort
from runtime.errors import BundleError

NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "bool": np.bool_}


class OrtGraph:
    """A ``DeviceEngine`` on ONNX Runtime's CPU provider, for the memory of a ``HostDevice``.

    It computes what a compiled engine computes, from the same graph, so it is the reference for one.
    exact: as for ``OrtEngine``
    """

    def __init__(self, path: Path, contract: GraphSpec, *, exact: bool, num_threads: int | None = None):
        options = session_options(exact, num_threads)
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        check_names(self._session, path.name, contract)
        self._inputs = [tensor.name for tensor in contract.inputs]
        self._outputs = [tensor.name for tensor in contract.outputs]

    def bind(self, arrays: Mapping[str, DeviceArray]) -> Callable[[], None]:
        binding = self._session.io_binding()
        for names, bind in ((self._inputs, binding.bind_input), (self._outputs, binding.bind_output)):
            for name in names:
                array = arrays[name]
                bind(name, "cpu", 0, NUMPY_TYPES[array.dtype], array.shape, array.address)
        return lambda: self._session.run_with_iobinding(binding)

    def run(self, arrays: Mapping[str, DeviceArray]) -> None:
        self.bind(arrays)()
