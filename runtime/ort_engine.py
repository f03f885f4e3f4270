"""The ONNX Runtime engine: static buffers bound by address, the KV cache updated in place.

The same address is bound to ``past_*`` and ``present_*``, which lets TensorScatter write into the
cache without a copy. Bindings are kept per input shape and made anew only when the cache moves.
"""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.bundle import GraphSpec, TensorSpec
from runtime.errors import BundleError
from runtime.kv_cache import KVCache

NUMPY_TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}
# Buffers of an engine's shapes that are kept bound: making them anew takes up to a millisecond. Tree sizes
# and numbers of rows recur, prompt lengths do not, so the oldest go.
MAX_BYTES = 64 << 20


class OrtStep:
    """One input shape's buffers and binding."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        kv: KVCache,
        axes: dict[str, int],
        row: int,
        outputs: frozenset[str],
    ):
        axes = {**axes, "S": kv.capacity}
        rows = slice(row, row + axes["B"])
        self._session = session
        self._binding = session.io_binding()
        self.inputs: dict[str, NDArray[np.generic]] = {}
        self.outputs: dict[str, NDArray[np.generic]] = {}
        for tensor in spec.inputs:
            cached = _cache_slice(tensor.name, kv, rows)
            array = _allocate(tensor, axes) if cached is None else cached
            if cached is None:
                self.inputs[tensor.name] = array
            self._binding.bind_input(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for tensor in spec.outputs:
            cached = _cache_slice(tensor.name, kv, rows)
            if cached is None and tensor.name not in outputs:
                continue
            array = _allocate(tensor, axes) if cached is None else cached
            if cached is None:
                self.outputs[tensor.name] = array
            self._binding.bind_output(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Of its own buffers, without the cache."""
        return sum(array.nbytes for array in (*self.inputs.values(), *self.outputs.values()))

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


class OrtEngine:
    """One ONNX graph on ONNX Runtime's CPU provider.

    outputs: the outputs that every step brings to the host; the others are computed only if these need them.
    """

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        kv: KVCache,
        *,
        outputs: frozenset[str],
        num_threads: int | None = None,
    ):
        options = ort.SessionOptions()
        options.intra_op_num_threads = num_threads or available_cores()
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Two engines take turns: the idle one's threads must not spin on the cores of the other.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        self._check_names(path.name, spec)
        self._spec = spec
        self._outputs = outputs
        self._steps: OrderedDict[tuple[object, ...], OrtStep] = OrderedDict()
        self._num_bytes = 0
        self._kv_version = kv.version
        self.kv = kv

    def step(self, also: tuple[str, ...] = (), /, *, row: int = 0, **axes: int) -> OrtStep:
        """The buffers of one input shape, bound on first use and whenever the cache has moved."""
        if self._kv_version != self.kv.version:
            self._steps.clear()
            self._num_bytes = 0
            self._kv_version = self.kv.version
        key = (row, *axes.items(), *also)
        step = self._steps.get(key)
        if step is None:
            step = OrtStep(self._session, self._spec, self.kv, axes, row, self._outputs.union(also))
            self._steps[key] = step
            self._num_bytes += step.num_bytes
            while self._num_bytes > MAX_BYTES and len(self._steps) > 1:
                _, oldest = self._steps.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
        self._steps.move_to_end(key)
        return step

    def _check_names(self, file: str, spec: GraphSpec) -> None:
        for kind, found, described in (
            ("inputs", self._session.get_inputs(), spec.inputs),
            ("outputs", self._session.get_outputs(), spec.outputs),
        ):
            names, expected = {t.name for t in found}, {t.name for t in described}
            if names != expected:
                raise BundleError(
                    f"{file}: {kind} differ from bundle.json: {sorted(names ^ expected)[:4]} are in one only"
                )


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cache_slice(name: str, kv: KVCache, rows: slice) -> NDArray[np.float32] | None:
    """The slab's part for ``past_key_3``, ``present_value_0``, ...; None for any other tensor."""
    prefix, _, layer = name.rpartition("_")
    if prefix in ("past_key", "present_key"):
        return kv.slab[2 * int(layer), rows]
    if prefix in ("past_value", "present_value"):
        return kv.slab[2 * int(layer) + 1, rows]
    return None


def _allocate(tensor: TensorSpec, axes: dict[str, int]) -> NDArray[np.generic]:
    shape = [axes[size] if isinstance(size, str) else size for size in tensor.shape]
    return np.zeros(shape, NUMPY_TYPES[tensor.dtype])
