"""Run a built graph with ONNX Runtime and compare its outputs, without the runtime's machinery."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from export.errors import ExportError
from runtime.bundle import GraphSpec

# Largest difference accepted, relative to the largest reference value. Float32 sums in another order differ
# by a few 1e-6, results of a wrong mask or position by far more than 1e-3.
TOLERANCE = 1e-4
CAPACITY = 64

Tensors = dict[str, NDArray[Any]]


class GraphRunner:
    """One sequence in a graph with a small cache, which moves on with every pass."""

    def __init__(self, path: Path, spec: GraphSpec):
        options = ort.SessionOptions()
        # Errors only: without bound buffers every TensorScatter warns that it copies.
        options.log_severity_level = 3
        # Packed weights would double the memory of a check that runs a handful of passes.
        options.add_session_config_entry("session.disable_prepacking", "1")
        # Between the few passes idle threads would only take cores from others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = [tensor for tensor in spec.inputs if not tensor.name.startswith("past_")]
        sizes = {"B": 1, "S": CAPACITY}
        self._cache = {
            tensor.name: np.zeros([sizes[n] if isinstance(n, str) else n for n in tensor.shape], np.float32)
            for tensor in spec.inputs
            if tensor not in self.inputs
        }

    def run(self, **given: NDArray[Any]) -> Tensors:
        """All outputs but the cache.

        given: inputs by name, as the outputs without the batch axis. Those that the graph does not have are
            ignored; open axes of inputs that are not given have size 0.
        """
        inputs = {}
        for tensor in self.inputs:
            empty = np.zeros([0 if isinstance(size, str) else size for size in tensor.shape[1:]])
            inputs[tensor.name] = np.asarray(given.get(tensor.name, empty), tensor.dtype)[None]
        names = [output.name for output in self._session.get_outputs()]
        outputs = dict(zip(names, self._session.run(None, inputs | self._cache), strict=True))
        for name in self._cache:
            self._cache[name] = outputs.pop(name.replace("past_", "present_"))
        return {name: array[0] for name, array in outputs.items()}

    def keep(self, start: int, path: NDArray[np.int64]) -> None:
        """Move the cache's positions ``start + path`` together, to ``start`` and after it."""
        for array in self._cache.values():
            array[:, :, start : start + path.size] = array[:, :, start + path]


def difference(what: str, found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """The largest absolute difference. Raises ExportError if it is larger than rounding explains."""
    difference = float(np.abs(np.subtract(found, expected, dtype=np.float64)).max())
    limit = TOLERANCE * max(1.0, float(np.abs(expected).max()))
    if not difference <= limit:  # NaN fails too
        raise ExportError(f"{what}: the graph differs from PyTorch by {difference:.2e}, accepted {limit:.0e}")
    return difference
