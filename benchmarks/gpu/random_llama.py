"""A Llama of any shape with random weights, as graphs of the target torch that need no file.

The operators are those that the exporter writes for a Llama (``export.graphs``) with its products merged. The
texts of such a model mean nothing; its passes cost what those of a trained one cost.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.device.pytorch.graph import Graph, Node

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
