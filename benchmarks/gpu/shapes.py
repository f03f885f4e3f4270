"""Passes of a step in the shape of a large model, timed alone: a stage of ``benchmarks.gpu.quick``.

Target model and commit are graphs of a Llama of any shape with random weights, for the target torch, with the
operators that the exporter writes for a Llama once its products are merged. A layer with its LM head over the
frames stands in for the draft head. All other stages are the bundle's own, on a GPU our kernels, and do not
depend on the width of a model."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.decoders import Skip
from benchmarks.gpu.job import device_facts
from runtime.core.bundle import Bundle, GraphSpec, TensorSpec
from runtime.core.errors import DeviceMemoryError, UserError
from runtime.device.device import DeviceArray, DeviceEngine, MakeEngine, write_array
from runtime.device.pytorch.device import TorchDevice
from runtime.device.pytorch.engine import TorchEngine
from runtime.device.pytorch.graph import Graph, Node
from runtime.load.device import open_device

EPSILON = 1e-5
TO_FLOAT32 = 1  # the number of float32 among ONNX's types


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. dtype: of weights, caches and activations"""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: str = "float16"

    @property
    def weight_bytes(self) -> int:
        """Bytes that a pass reads of all matrices but the embedding."""
        columns = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * (columns + self.heads * self.head_dim + 3 * self.inner)
        return getattr(torch, self.dtype).itemsize * (self.layers * layer + self.hidden * self.vocab)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        return getattr(torch, self.dtype).itemsize * 2 * self.layers * self.kv_heads * self.head_dim


# The sizes of Mistral 7B, and such as a CPU runs in a moment.
LARGE = Shape(4096, 14336, 32, 32, 8, 128, 32000)
SMALL = Shape(64, 96, 2, 4, 2, 16, 300)


class _Nodes:
    """Collects the nodes and constants of a graph."""

    def __init__(self, make: Callable[..., Tensor]):
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self._make = make

    def add(self, operator: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: object) -> str:
        names = outputs or (f"value_{len(self.nodes)}",)
        self.nodes.append(Node(names[0], operator, inputs, names, attributes))
        return names[0]

    def weight(self, *sizes: int) -> str:
        return self._constant(self._make(sizes))

    def numbers(self, *values: int) -> str:
        return self._constant(torch.tensor(values, dtype=torch.int64))

    def _constant(self, value: Tensor) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name


def target_model(shape: Shape, make: Callable[..., Tensor]) -> tuple[Graph, GraphSpec]:
    """The graph of a target model, whose next token is chosen after every row.

    make: a random weight of the sizes that it is given, in the device's memory
    """
    nodes, width = _Nodes(make), shape.head_dim
    numbers = torch.arange(0, width, 2) / width
    nodes.constants["frequencies"] = 10000.0 ** -numbers.to(torch.float32)
    positions = nodes.add("Unsqueeze", "position_ids", nodes.numbers(2))
    angles = nodes.add("Mul", nodes.add("Cast", positions, to=TO_FLOAT32), "frequencies")
    kind = {"float16": 10, "bfloat16": 16, "float32": 1}[shape.dtype]
    cos, sin = (nodes.add("Cast", nodes.add(name, angles), to=kind) for name in ("Cos", "Sin"))
    heads, keys = shape.heads, shape.kv_heads
    stream = nodes.add("Gather", nodes.weight(shape.vocab, shape.hidden), "input_ids", axis=0)
    as_heads, as_rows = nodes.numbers(0, 0, heads + 2 * keys, width), nodes.numbers(0, 0, heads * width)
    rotated_and_not, queries_and_keys = nodes.numbers(heads + keys, keys), nodes.numbers(heads, keys)

    def normal(value: str) -> str:
        return nodes.add("RMSNormalization", value, nodes.weight(shape.hidden), axis=-1, epsilon=EPSILON)

    for layer in range(shape.layers):
        product = nodes.add("MatMul", normal(stream), nodes.weight(shape.hidden, (heads + 2 * keys) * width))
        apart = nodes.add("Transpose", nodes.add("Reshape", product, as_heads), perm=[0, 2, 1, 3])
        parts = (f"rotated_{layer}", f"value_of_{layer}")
        nodes.add("Split", apart, rotated_and_not, outputs=parts, axis=1)
        rotated = nodes.add("RotaryEmbedding", parts[0], cos, sin)
        named = (f"query_{layer}", f"key_{layer}")
        nodes.add("Split", rotated, queries_and_keys, outputs=named, axis=1)
        for cache, new in (("key", named[1]), ("value", parts[1])):
            past, present = f"past_{cache}_{layer}", f"present_{cache}_{layer}"
            nodes.add("TensorScatter", past, new, "write_index", outputs=(present,), axis=2)
        caches = f"present_key_{layer}", f"present_value_{layer}"
        found = nodes.add("Attention", named[0], *caches, "attn_mask", scale=width**-0.5)
        rows = nodes.add("Reshape", nodes.add("Transpose", found, perm=[0, 2, 1, 3]), as_rows)
        stream = nodes.add(
            "Add", stream, nodes.add("MatMul", rows, nodes.weight(heads * width, shape.hidden))
        )
        both = nodes.add("MatMul", normal(stream), nodes.weight(shape.hidden, 2 * shape.inner))
        halves = (f"gate_{layer}", f"up_{layer}")
        nodes.add("Split", both, outputs=halves, axis=-1, num_outputs=2)
        gate = nodes.add("Mul", halves[0], nodes.add("Sigmoid", halves[0]))
        inner = nodes.add("Mul", gate, halves[1])
        stream = nodes.add("Add", stream, nodes.add("MatMul", inner, nodes.weight(shape.inner, shape.hidden)))
    logits = nodes.add("MatMul", normal(stream), nodes.weight(shape.hidden, shape.vocab))
    nodes.add("ArgMax", logits, outputs=("next_tokens",), axis=-1, keepdims=0)
    inputs = (
        TensorSpec("input_ids", ("B", "N"), "int64"),
        TensorSpec("position_ids", ("B", "N"), "int64"),
        TensorSpec("attn_mask", ("B", 1, "N", "S"), "bool"),
        TensorSpec("write_index", ("B",), "int64"),
        *_caches(shape, "past"),
    )
    outputs = (TensorSpec("next_tokens", ("B", "N"), "int64"), *_caches(shape, "present"))
    return Graph(tuple(nodes.nodes), nodes.constants), GraphSpec(inputs, outputs)


def commit(shape: Shape, length: int) -> tuple[Graph, GraphSpec]:
    """The graph that packs the caches along paths of ``length`` nodes."""
    nodes = _Nodes(torch.empty)
    places = nodes.add("Add", nodes.add("Unsqueeze", "lengths", nodes.numbers(1)), "path")
    rows = nodes.add("Reshape", places, nodes.numbers(-1, 1, length, 1))
    index = nodes.add("Expand", rows, nodes.numbers(1, shape.kv_heads, length, shape.head_dim))
    for past, present in zip(_caches(shape, "past"), _caches(shape, "present"), strict=True):
        moved = nodes.add("GatherElements", past.name, index, axis=2)
        nodes.add("TensorScatter", past.name, moved, "lengths", outputs=(present.name,), axis=2)
    inputs = (
        TensorSpec("path", ("B", length), "int64"),
        TensorSpec("lengths", ("B",), "int64"),
        *_caches(shape, "past"),
    )
    return Graph(tuple(nodes.nodes), nodes.constants), GraphSpec(inputs, _caches(shape, "present"))


def _caches(shape: Shape, when: str) -> tuple[TensorSpec, ...]:
    sizes = ("B", shape.kv_heads, "S", shape.head_dim)
    return tuple(
        TensorSpec(f"{when}_{name}_{layer}", sizes, shape.dtype)
        for layer in range(shape.layers)
        for name in ("key", "value")
    )


BATCHES, CONTEXTS = (1, 4, 16), (512, 2048, 4096, 8192, 16384)
SMALL_BATCHES, SMALL_CONTEXTS = (1, 2), (32, 64)
# Replays of a pass that are timed together.
REPLAYS = 20
# Positions of a cache behind the context.
ROOM = 128
# Of the free memory; the rest is for what passes compute.
CACHE_SHARE = 0.8


def measure(args: argparse.Namespace, write: Callable[..., None]) -> None:
    """Time all passes by batch, context and nodes; ``write`` gets what has been found after every row."""
    bundle = Bundle.load(args.bundle, verify=False)
    spec = bundle.manifest.drafter
    if spec is None or len(bundle.manifest.step_nodes) < 2:
        raise UserError("--bundle: needs a draft head and graphs of steps with nodes")
    device, make = open_device(bundle, args.device, args.threads)
    try:
        if not isinstance(device, TorchDevice):
            raise UserError(f"--bundle: expected one of the target torch, got {bundle.manifest.target}")
        shape = replace(SMALL, dtype="float32") if args.small else LARGE
        facts = device_facts(args.device, None)
        write(shape=vars(shape), device=vars(facts), weight_bytes=shape.weight_bytes)
        passes = _Passes(device, shape, bundle, make)
        contexts, batches = (SMALL_CONTEXTS, SMALL_BATCHES) if args.small else (CONTEXTS, BATCHES)
        passes.reserve([batch * (context + ROOM) for batch in batches for context in contexts])
        rows: list[dict[str, Any]] = []
        for context in contexts:
            for batch in batches:
                for nodes in bundle.manifest.step_nodes:
                    if time.monotonic() > args.until:
                        raise Skip(f"the time was over after {len(rows)} rows")
                    rows.append({"batch": batch, "context": context, "nodes": nodes})
                    rows[-1] |= _row(passes, batch, context, nodes, facts.bandwidth)
                    write(rows=rows)
    finally:
        device.close()


def _row(passes: "_Passes", batch: int, context: int, nodes: int, bandwidth: float | None) -> dict[str, Any]:
    try:
        times = passes.milliseconds(batch, context, nodes)
    except DeviceMemoryError as error:
        return {"skipped": str(error)}
    shape = passes.shape
    size = shape.weight_bytes + batch * context * shape.cache_bytes
    speed = size / (times["verify"] / 1e3) if times["verify"] else None
    return {
        "ms": times,
        "step_ms": sum(times.values()),
        "verify_bytes": size,
        "share_of_bandwidth": speed / bandwidth if speed and bandwidth else None,
    }


class _Passes:
    """The engines of a step, and the memory that their passes share."""

    def __init__(self, device: TorchDevice, shape: Shape, bundle: Bundle, make_own: MakeEngine):
        """make_own: makes engines of the bundle's graphs"""
        self.shape, self._device = shape, device
        spec = bundle.manifest.drafter
        assert spec is not None
        self._frames = spec.num_frames
        (self._path,) = {t.shape[1] for t in bundle.manifest.graphs["accept"].outputs if t.name == "path"}
        assert isinstance(self._path, int)
        self._engines: dict[str, tuple[DeviceEngine, GraphSpec]] = {}
        place, dtype = torch.device(device.name), getattr(torch, shape.dtype)

        def make(sizes: tuple[int, ...]) -> Tensor:
            return torch.randn(sizes, device=place, dtype=dtype) * 0.02

        for name, (graph, contract) in {
            "verify": target_model(shape, make),
            "draft": target_model(replace(shape, layers=1), make),
            "commit": commit(shape, self._path),
        }.items():
            self._engines[name] = TorchEngine(device, graph, contract, name=name), contract
        for name in ("prepare", "accept", *(f"search_{count}" for count in bundle.manifest.step_nodes)):
            self._engines[name] = make_own(name), bundle.manifest.graphs[name]
        # By name and tensor, each as large as its largest use so far.
        self._memory: dict[tuple[str, str], DeviceArray] = {}

    def reserve(self, positions: Sequence[int]) -> None:
        """Allocate the caches for the largest of these numbers of positions that fits into the GPU's memory.

        Smaller passes use the beginning. A device frees nothing before it is closed, so caches that grew from
        pass to pass would take twice the memory in all.
        """
        if not self._device.is_gpu:
            return
        room = CACHE_SHARE * self._device.free_memory()[0]
        fitting = [count for count in positions if count * self.shape.cache_bytes <= room]
        for tensor in _caches(self.shape, "past") if fitting else ():
            self._array("", tensor, {"B": 1, "S": max(fitting)})

    def milliseconds(self, batch: int, context: int, nodes: int) -> dict[str, float]:
        """The time of every stage of a step; of a plain one for 0 nodes."""
        sizes = {"B": batch, "S": context + ROOM, "R": context + ROOM, "N": nodes + 1}
        search, accept = (self._time(name, sizes, context) for name in (f"search_{nodes}", "accept"))
        times = {"search": search, "verify": self._time("verify", sizes, context), "accept": accept}
        if not nodes:
            return times
        frames = {**sizes, "N": self._frames}
        times["draft"] = self._time("prepare", sizes, context) + self._time("draft", frames, context)
        return {**times, "commit": self._time("commit", sizes, context)}

    def _time(self, name: str, sizes: Mapping[str, int], context: int) -> float:
        """Milliseconds of a pass, as the mean of replays in a row."""
        engine, contract = self._engines[name]
        arrays = {tensor.name: self._array(name, tensor, sizes) for tensor in contract.inputs}
        for tensor in contract.outputs:
            past = arrays.get(tensor.name.replace("present_", "past_"))
            arrays[tensor.name] = past or self._array(name, tensor, sizes)
        if "attn_mask" in arrays and name in ("verify", "draft"):
            mask = np.arange(sizes["S"]) < context
            write_array(self._device, arrays["attn_mask"], np.broadcast_to(mask, arrays["attn_mask"].shape))
            write_array(self._device, arrays["write_index"], np.full(sizes["B"], context))
        launch = engine.bind(arrays)
        launch()
        self._device.synchronize()
        return self._of_replays(self._device.capture(launch))

    def _of_replays(self, launch: Callable[[], None]) -> float:
        launch()
        begin = self._device.mark()
        for _ in range(REPLAYS):
            launch()
        end = self._device.mark()
        self._device.synchronize()
        return self._device.milliseconds(begin, end) / REPLAYS

    def _array(self, name: str, tensor: Any, sizes: Mapping[str, int]) -> DeviceArray:
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape)
        # The target model, the stand-in for the head and the commit share the caches, which are large.
        key = ("" if tensor.name.startswith("past_") else name, tensor.name)
        wanted = DeviceArray(0, shape, tensor.dtype)
        if key not in self._memory or self._memory[key].nbytes < wanted.nbytes:
            self._memory[key] = self._device.allocate(shape, tensor.dtype)
        return self._memory[key].view(shape)
