"""The ONNX Runtime engine: static buffers bound by address, the KV cache updated in place.

The same address is bound to ``past_*`` and ``present_*``, which lets TensorScatter write into the
cache without a copy. Every tensor has one buffer, of which a step uses as much as its shape needs;
bindings are kept per shape, and made anew only when the cache moves or a buffer grows.
"""

import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from runtime.bundle import GraphSpec, TensorSpec
from runtime.engines.kv_cache import KVCache
from runtime.errors import BundleError

NUMPY_TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}
# Shapes that are kept bound. Tree sizes and numbers of rows recur, prompt lengths do not: the oldest go.
MAX_SHAPES = 512


class Buffers:
    """A flat array for every tensor, as large as its largest shape so far."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[np.generic]] = {}
        # Bumped whenever one moves.
        self.version = 0

    def take(self, tensor: TensorSpec, axes: dict[str, int]) -> NDArray[np.generic]:
        """The beginning of a tensor's array, in its shape for these axes, with whatever it holds."""
        shape = [axes[size] if isinstance(size, str) else size for size in tensor.shape]
        count = int(np.prod(shape))
        flat = self._flat.get(tensor.name)
        if flat is None or flat.size < count:
            # At least a quarter more each time, so that bindings are seldom made anew.
            size = count if flat is None else max(count, flat.size * 5 // 4)
            flat = self._flat[tensor.name] = np.zeros(size, NUMPY_TYPES[tensor.dtype])
            self.version += 1
        return flat[:count].reshape(shape)


class OrtStep:
    """One input shape's part of the buffers, and its binding."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        kv: KVCache,
        buffers: Buffers,
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
            array = buffers.take(tensor, axes) if cached is None else cached
            if cached is None:
                self.inputs[tensor.name] = array
            self._binding.bind_input(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for tensor in spec.outputs:
            cached = _cache_slice(tensor.name, kv, rows)
            if cached is None and tensor.name not in outputs:
                continue
            array = buffers.take(tensor, axes) if cached is None else cached
            if cached is None:
                self.outputs[tensor.name] = array
            self._binding.bind_output(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

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
        # A plan of every shape's memory is kept for ever, tens of KiB each, and saves 2% of a pass at most.
        options.enable_mem_pattern = False
        # Two engines take turns: the idle one's threads must not spin on the cores of the other.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error
        self._check_names(path.name, spec)
        self._spec = spec
        self._outputs = outputs
        self._buffers = Buffers()
        self._steps: OrderedDict[tuple[object, ...], OrtStep] = OrderedDict()
        # Of the cache and the buffers that the steps are bound to.
        self._versions = (kv.version, self._buffers.version)
        self.kv = kv

    def step(self, also: tuple[str, ...] = (), /, *, row: int = 0, **axes: int) -> OrtStep:
        """The buffers of one input shape; all shapes share them, so fill every input before each run."""
        self._forget_moved()
        key = (row, *axes.items(), *also)
        step = self._steps.get(key)
        if step is None:
            outputs = self._outputs.union(also)
            step = OrtStep(self._session, self._spec, self.kv, self._buffers, axes, row, outputs)
            self._forget_moved()
            self._steps[key] = step
            if len(self._steps) > MAX_SHAPES:
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return step

    def _forget_moved(self) -> None:
        """Drop the bindings to memory that has moved."""
        versions = (self.kv.version, self._buffers.version)
        if self._versions != versions:
            self._steps.clear()
            self._versions = versions

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
