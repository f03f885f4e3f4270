"""Run a built graph and compare its outputs, without the runtime's machinery."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.errors import ExportError
from export.precision import NUMPY_TYPES, Precision
from export.verify.upcast import runnable
from runtime.core.bundle import GraphSpec
from runtime.engines.ort_wheel import ort

# Largest difference accepted by the type of the activations, relative to the largest reference value. Float32
# sums in another order differ by a few 1e-6, results of a wrong mask or position by more than any of these.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# Positions of a cache whose capacity the graph leaves open.
CAPACITY = 64
# The input of a step's graphs that has a cache's positions.
POSITIONS = "positions"

Tensors = dict[str, NDArray[Any]]


Execute = Callable[[Tensors], Tensors]


class GraphRunner:
    """One sequence in a graph with a small cache, which moves on with every pass.

    execute: runs a pass: all inputs by name, caches too, to all outputs
    up_cast: whether it takes and returns float32 where the contract has bfloat16
    All inputs and outputs of ``run`` are float32 or integers, whatever the graph computes in.
    """

    def __init__(self, execute: Execute, contract: GraphSpec, precision: Precision, *, up_cast: bool = False):
        self._execute = execute
        self._types = {**{name: np.dtype(name) for name in ("int64", "bool")}, **NUMPY_TYPES}
        if up_cast:
            self._types["bfloat16"] = np.dtype(np.float32)
        self.activations = precision.activations
        self.inputs = [tensor for tensor in contract.inputs if not tensor.name.startswith("past_")]
        sizes = {"B": 1, "S": _open_capacity(contract)}
        past = [tensor for tensor in contract.inputs if tensor not in self.inputs]
        # Graphs of a step read the positions of a cache that they do not have.
        sizes_of_caches = [t.shape[2] for t in past] + [
            t.shape[0] for t in self.inputs if t.name == POSITIONS
        ]
        self.capacity = next((size for size in sizes_of_caches if isinstance(size, int)), sizes["S"])
        # The contents of the caches by the names of the inputs, before the next pass.
        self.cache = {
            tensor.name: np.zeros(
                [sizes[n] if isinstance(n, str) else n for n in tensor.shape], self._types[tensor.dtype]
            )
            for tensor in past
        }

    def run(self, **given: NDArray[Any]) -> Tensors:
        """All outputs but the cache.

        given: inputs by name, as the outputs without the batch axis. Those that the graph does not have are
            ignored; open axes of inputs that are not given have size 0.
        """
        inputs = {}
        for tensor in self.inputs:
            empty = np.zeros([0 if isinstance(size, str) else size for size in tensor.shape[1:]])
            array = np.asarray(given.get(tensor.name, empty), self._types[tensor.dtype])
            inputs[tensor.name] = array[None] if tensor.shape[0] == "B" else array
        outputs = self._execute(inputs | self.cache)
        for name in self.cache:
            self.cache[name] = outputs.pop(name.replace("past_", "present_"))
        return {name: _exact(array[0]) for name, array in outputs.items()}

    def keep(self, start: int, path: NDArray[np.int64]) -> None:
        """Move the cache's positions ``start + path`` together, to ``start`` and after it."""
        for array in self.cache.values():
            array[:, :, start : start + path.size] = array[:, :, start + path]

    def difference(
        self, what: str, found: NDArray[np.generic], expected: NDArray[np.generic], *, slack: float = 1.0
    ) -> float:
        """The largest absolute difference. Raises ExportError if it is larger than rounding explains.

        slack: by how much rounding may grow on the way
        """
        difference = float(np.abs(np.subtract(found, expected, dtype=np.float64)).max())
        limit = slack * TOLERANCES[self.activations] * max(1.0, float(np.abs(expected).max()))
        if not difference <= limit:  # NaN fails too
            raise ExportError(
                f"{what}: the graph differs from PyTorch by {difference:.2e}, accepted {limit:.0e}"
            )
        return difference


def _open_capacity(contract: GraphSpec) -> int:
    """Positions of a cache whose capacity is open: those of streams come on top, for each of some nodes."""
    shapes = [t.shape for t in contract.outputs if t.name == "frame_tokens" and len(t.shape) == 4]
    frames = shapes[0][2] if shapes else 0
    assert isinstance(frames, int)
    return CAPACITY + 8 * frames


def _exact(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype.kind in "ib" else array.astype(np.float32)


def onnx_runner(path: Path, contract: GraphSpec, precision: Precision) -> GraphRunner:
    """The graph of a file on ONNX Runtime's CPU provider."""
    options = ort.SessionOptions()
    # Errors only: without bound buffers every TensorScatter warns that it copies.
    options.log_severity_level = 3
    # Packed weights would double the memory of a check that runs a handful of passes.
    options.add_session_config_entry("session.disable_prepacking", "1")
    # Between the few passes idle threads would only take cores from others.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with runnable(path, contract) as (model, up_cast):
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def execute(inputs: Tensors) -> Tensors:
        return dict(zip(names, session.run(None, inputs), strict=True))

    return GraphRunner(execute, contract, precision, up_cast=up_cast)
