"""The ONNX Runtime engine: static buffers bound by address, the KV cache updated in place.

The same address is bound to ``past_*`` and ``present_*``, which lets TensorScatter write into the cache
without a copy. Every tensor has one buffer, of which a pass uses as much as its shape needs. Bindings are
kept for each shape, and are made anew only when the cache moves or a buffer grows.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import Bundle, DrafterSpec, GraphSpec, ModelSpec, TensorSpec
from runtime.core.errors import BundleError
from runtime.core.system import available_cores
from runtime.engines.huge_pages import huge_pages
from runtime.engines.kv_cache import (
    BUCKET,
    KEPT_BUCKETS,
    LARGE_BUCKET,
    SlabKVCache,
    fill_causal_mask,
    fill_frame_mask,
    fill_padding_mask,
    fill_tree_mask,
)
from runtime.engines.operators import describe_processor, operator_library
from runtime.engines.ort_wheel import ort
from runtime.engines.protocol import UNBROKEN, Features

# Of a graph's file; of its second forms, whose products multiply whole numbers, with signed and with unsigned
# weights; and of the form for the operators of ``runtime.engines.operators``.
SUFFIX, INT8_SUFFIX, UINT8_SUFFIX, COMPILED_SUFFIX = ".onnx", ".int8.onnx", ".uint8.onnx", ".compiled.onnx"
NUMPY_TYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}
# Shapes whose bindings are kept, those used last. Tree sizes and batch sizes recur, prompt lengths do not.
MAX_SHAPES = 512
# How ONNX Runtime computes products with quantised weights. Its fast kernels round the activations to int8,
# which turns a rounding error of 1e-7 before a product into one of 1e-2 in a logit. If passes of different
# shapes differ by such errors, a target model's text depends on how many drafts are verified at once. So they
# are for a draft head, which never changes the text, and for graphs that give a row the same bits in every
# pass (``runtime.decode.target_model``). Otherwise weights become float32 when they are loaded.
FLOAT32_PRODUCTS = ("session.disable_quant_qdq", "1")
INT8_PRODUCTS = ("session.qdq_matmulnbits_accuracy_level", "4")

# Positions over which a product with keys and values adds up before it begins anew: ``STRIDE_K`` of MLAS,
# which doubles as often as the columns of the product, a head's size, fit into half of ``STRIDE_N``.
STRIDE_K, STRIDE_N, LEAST_STRIDE_N = 128, 128, 16


def key_block(head_dim: int) -> int:
    """The positions of a block of keys, by which the products of attention cut their sums."""
    columns, block = STRIDE_N, STRIDE_K
    while columns > LEAST_STRIDE_N and columns // 2 >= head_dim:
        columns, block = columns // 2, block * 2
    return block


class Buffers:
    """A flat array for every tensor, as large as its largest shape so far."""

    def __init__(self) -> None:
        self._flat: dict[str, NDArray[np.generic]] = {}
        self.version = 0  # increased whenever an array moves

    def take(self, tensor: TensorSpec, axes: dict[str, int]) -> NDArray[np.generic]:
        """The beginning of a tensor's array, in its shape for these axes, with whatever it holds."""
        shape = [axes[size] if isinstance(size, str) else size for size in tensor.shape]
        count = int(np.prod(shape))
        flat = self._flat.get(tensor.name)
        if flat is None or flat.size < count:
            # An array grows by at least a quarter, so that bindings are seldom made anew.
            size = count if flat is None else max(count, flat.size * 5 // 4)
            flat = self._flat[tensor.name] = np.zeros(size, NUMPY_TYPES[tensor.dtype])
            self.version += 1
        return flat[:count].reshape(shape)


def cache_tensors(kv: SlabKVCache, slot: int, num_slots: int) -> dict[str, ort.OrtValue]:
    """``past_key_3``, ``present_value_0``, ... of some slots, by name: parts of the slab's memory.

    Making them is most of the binding of a shape (120 of 128 tensors with 30 layers), so shapes share them.
    """
    if (slot, num_slots) not in kv.tensors:
        parts = [ort.OrtValue.ortvalue_from_numpy(part[slot : slot + num_slots]) for part in kv.slab]
        kv.tensors[slot, num_slots] = {
            f"{state}_{'value' if index % 2 else 'key'}_{index // 2}": part
            for index, part in enumerate(parts)
            for state in ("past", "present")
        }
    return kv.tensors[slot, num_slots]


class OrtForwardPass:
    """The part of the buffers that one input shape uses, and its binding."""

    def __init__(
        self,
        session: ort.InferenceSession,
        spec: GraphSpec,
        kv: SlabKVCache,
        buffers: Buffers,
        axes: dict[str, int],
        slot: int,
        outputs: frozenset[str],
    ):
        # Graphs of the target torch read the first R positions of the caches, here all.
        axes = {**axes, "S": kv.capacity, "R": kv.capacity}
        cached = cache_tensors(kv, slot, axes["B"])
        self._session = session
        self._binding = session.io_binding()
        self.kv = kv
        self.inputs: dict[str, NDArray[np.generic]] = {}
        self.outputs: dict[str, NDArray[Any]] = {}
        for tensor in spec.inputs:
            if tensor.name in cached:
                self._binding.bind_ortvalue_input(tensor.name, cached[tensor.name])
                continue
            array = self.inputs[tensor.name] = buffers.take(tensor, axes)
            self._binding.bind_input(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for tensor in spec.outputs:
            if tensor.name in cached:
                self._binding.bind_ortvalue_output(tensor.name, cached[tensor.name])
            elif tensor.name in outputs:
                array = self.outputs[tensor.name] = buffers.take(tensor, axes)
                self._binding.bind_output(tensor.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def mask_tree(self, parents: Sequence[NDArray[np.int64]], lengths: Sequence[int], first: int = 0) -> None:
        for mask, nodes, length in zip(self.inputs["attn_mask"], parents, lengths, strict=True):
            fill_tree_mask(mask[0], nodes, length, first)
            size = nodes.size - first
            if size < mask.shape[1]:
                fill_padding_mask(mask[0], size, length + first)

    def mask_causal(self, starts: Sequence[int]) -> None:
        for mask, start in zip(self.inputs["attn_mask"], starts, strict=True):
            fill_causal_mask(mask[0], start)

    def mask_frames(self, lengths: Sequence[int], first_frame: Sequence[int]) -> None:
        for mask, length, first in zip(self.inputs["attn_mask"], lengths, first_frame, strict=True):
            fill_frame_mask(mask[0], length, first)

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def features(self, sizes: Sequence[int]) -> Features:
        if "features" not in self.outputs:
            return Features([np.empty((size, 0), np.float32) for size in sizes])
        return Features([block[:size] for block, size in zip(self.outputs["features"], sizes, strict=True)])


class ShortForwardPass(OrtForwardPass):
    """A pass of short texts that works on a copy of their keys and values.

    Attention computes over the capacity of the cache, which follows the longest text of all slots. The copy's
    capacity follows the texts of the pass.
    """

    whole: SlabKVCache
    first_slot: int

    def run(self) -> None:
        whole, copy = self.whole.slab, self.kv.slab
        starts, count = self.inputs["write_index"].tolist(), self.inputs["input_ids"].shape[1]
        for index, start in enumerate(starts):
            copy[:, index, :, :start] = whole[:, self.first_slot + index, :, :start]
        super().run()
        for index, start in enumerate(starts):
            new = slice(start, start + count)
            whole[:, self.first_slot + index, :, new] = copy[:, index, :, new]


class OrtEngine:
    """One ONNX graph on ONNX Runtime's CPU provider.

    outputs: the outputs that every pass brings to the host; others are computed only if these need them
    int8_products: compute products with quantised weights with activations in int8, and not in float32
    compiled: whether the graph has operators of ``runtime.engines.operators``
    """

    min_rows = 1
    row_multiple = 1

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        kv: SlabKVCache,
        *,
        outputs: frozenset[str],
        int8_products: bool,
        num_threads: int | None = None,
        compiled: bool = False,
    ):
        self._session = open_session(path, num_threads, int8_products=int8_products, compiled=compiled)
        check_names(self._session, path.name, spec)
        for tensor in (*spec.inputs, *spec.outputs):
            if tensor.dtype not in NUMPY_TYPES:
                raise BundleError(
                    f"{path.name}: {tensor.name}: expected float32, in which steps on the host compute, got "
                    f"{tensor.dtype}; steps of graphs run it on a device"
                )
        self._spec = spec
        self._is_compiled = compiled
        self._outputs = outputs
        self._buffers = Buffers()
        self._passes: OrderedDict[tuple[object, ...], OrtForwardPass] = OrderedDict()
        # The memory of short passes, by its capacity.
        self._short: dict[int, SlabKVCache] = {}
        # The version of the buffers that the passes are bound to.
        self._version = self._buffers.version
        self.kv = kv
        kv.on_move = WeakMethod(self._forget)

    @property
    def key_block(self) -> int | None:
        """That of the graph's heads; None for a graph without a cache."""
        if self._is_compiled:
            return UNBROKEN
        head_dims = [tensor.shape[3] for tensor in self._spec.inputs if tensor.name.startswith("past_key_")]
        return key_block(int(head_dims[0])) if head_dims else None

    def round_up(self, **axes: int) -> dict[str, int]:
        """ONNX Runtime runs every shape as it is, but for ``min_rows`` and ``row_multiple``."""
        if self.min_rows == self.row_multiple == 1:
            return axes
        batch = axes.get("B", 1)  # products see the rows of all sequences together
        least = -(-self.min_rows // batch)
        multiple = self.row_multiple // math.gcd(self.row_multiple, batch)
        return {
            name: size if name == "B" else -(-max(size, least) // multiple) * multiple
            for name, size in axes.items()
        }

    def forward_pass(
        self, extra_outputs: tuple[str, ...] = (), /, *, slot: int = 0, reads: int | None = None, **axes: int
    ) -> OrtForwardPass:
        """All shapes share the buffers, so fill every input before each run."""
        self._forget_moved_buffers()
        # Compiled attention computes over the keys that a row sees.
        short = self.kv.short_capacity(reads) if reads and not self._is_compiled else None
        key = (slot, short, *axes.items(), *extra_outputs)
        forward = self._passes.get(key)
        if forward is None:
            forward = self._bind(axes, slot, short, self._outputs.union(extra_outputs))
            self._forget_moved_buffers()
            self._passes[key] = forward
            if len(self._passes) > MAX_SHAPES:
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        return forward

    def _bind(
        self, axes: dict[str, int], slot: int, short: int | None, outputs: frozenset[str]
    ) -> OrtForwardPass:
        given = self._session, self._spec
        if short is None:
            return OrtForwardPass(*given, self.kv, self._buffers, axes, slot, outputs)
        memory = self._short.get(short)
        # Memory for the copies of too few slots is replaced.
        if memory is None or memory.num_slots < axes["B"]:
            memory = self._short[short] = self.kv.of_capacity(short, axes["B"])
        forward = ShortForwardPass(*given, memory, self._buffers, axes, 0, outputs)
        forward.whole, forward.first_slot = self.kv, slot
        return forward

    def _forget(self) -> None:
        """Drop what is bound to a cache that has moved, at once: it would keep the cache's memory."""
        self._passes.clear()
        self._short.clear()

    def _forget_moved_buffers(self) -> None:
        if self._version != self._buffers.version:
            self._passes.clear()
            self._version = self._buffers.version


def make_host_engine(
    bundle: Bundle,
    name: str,
    sizes: ModelSpec | DrafterSpec,
    *,
    capacity: int,
    max_num_seqs: int,
    outputs: frozenset[str],
    num_threads: int | None,
    int8_products: bool,
    compiled: bool = False,
) -> OrtEngine:
    """A graph's engine, with its key/value cache.

    name, sizes: of the graph, and of its layers and heads
    capacity, max_num_seqs: positions that the cache of every sequence has, and how many sequences
    outputs, int8_products, compiled: as of ``OrtEngine``
    num_threads: None for all cores
    """
    kv = SlabKVCache(
        num_layers=sizes.num_layers,
        num_slots=max_num_seqs,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_capacity=capacity,
        bucket=LARGE_BUCKET if compiled else BUCKET,
        kept_buckets=KEPT_BUCKETS if compiled else 1,
    )
    return OrtEngine(
        graph_file(bundle, name, int8_products=int8_products, compiled=compiled),
        bundle.manifest.graphs[name],
        kv,
        outputs=outputs,
        int8_products=int8_products,
        num_threads=num_threads,
        compiled=compiled,
    )


def graph_file(bundle: Bundle, name: str, *, int8_products: bool, compiled: bool = False) -> Path:
    """The file of a graph: a second form, if there is one and products are to be in int8.

    Without VNNI, kernels for uint8 times int8 add two products in 16 bits, which may overflow. Those for
    uint8 times uint8 do not; with VNNI they are the slower ones.

    compiled: take the form for operators that are compiled here, as ``has_compiled_form`` says
    """
    if compiled:
        return bundle.path / f"{name}{COMPILED_SUFFIX}"
    second = INT8_SUFFIX if adds_in_32_bits() else UINT8_SUFFIX
    has_second = int8_products and f"{name}{second}" in bundle.manifest.files
    return bundle.path / f"{name}{second if has_second else SUFFIX}"


def has_compiled_form(bundle: Bundle, name: str) -> bool:
    """Whether a bundle has a graph in a form whose operators this machine has compiled."""
    return f"{name}{COMPILED_SUFFIX}" in bundle.manifest.files and operator_library() is not None


def open_session(
    path: Path,
    num_threads: int | None = None,
    *,
    int8_products: bool,
    compiled: bool = False,
    profile: Path | None = None,
) -> ort.InferenceSession:
    """A session of a graph's file. Raises BundleError.

    int8_products, compiled: as of ``OrtEngine``
    profile: the beginning of the path to which ONNX Runtime writes the time of every operator
    """
    options = session_options(num_threads, int8_products=int8_products)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    try:
        if compiled:
            options.register_custom_ops_library(str(operator_library()))
        with huge_pages():
            return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BundleError(f"ONNX Runtime {ort.__version__} cannot load {path.name}: {error}") from error


def check_names(session: ort.InferenceSession, file: str, spec: GraphSpec) -> None:
    """Raises BundleError if a session's inputs or outputs are not those of the contract."""
    for kind, found, described in (
        ("inputs", session.get_inputs(), spec.inputs),
        ("outputs", session.get_outputs(), spec.outputs),
    ):
        names, expected = {t.name for t in found}, {t.name for t in described}
        if names != expected:
            raise BundleError(
                f"{file}: {kind} differ from bundle.json: {sorted(names ^ expected)[:4]} are in one only"
            )


def session_options(num_threads: int | None = None, *, int8_products: bool) -> ort.SessionOptions:
    """The options of an engine's session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads or available_cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # A memory plan of every shape would be kept for ever: tens of KiB each, for 2 % of a pass.
    options.enable_mem_pattern = False
    # Two engines take turns: the threads of the idle one must not spin on the cores of the other.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(*(INT8_PRODUCTS if int8_products else FLOAT32_PRODUCTS))
    return options


def adds_in_32_bits() -> bool:
    """Whether this processor has instructions (VNNI) that add the products of bytes in 32 bits at once."""
    return "vnni" in describe_processor()
