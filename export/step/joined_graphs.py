"""Step-logic graphs that are joined from parts, each of which is traced once.

torch.export needs about 20 ms for an operator whose shapes are open. A graph that does the same again and
again is traced in parts. For a search over twelve frames torch.export takes half a minute: all frames compute
the same, and trees of different sizes differ in two constants, so the beginning, one frame and the end are
traced with open sizes and joined, frame after frame, for every size of a tree. The sampled accept is joined
from a beginning, many halvings and an end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn

from drafters.lattice import LatticeTensors
from drafters.tree_search import Prefixes, read_frame, root_prefixes, tree_of
from export.graphs.trace import OPSET, trace
from export.step.acceptance import (
    BLOCK,
    HALVINGS,
    Nucleus,
    draw,
    halve,
    widest_nucleus,
)
from export.step.modules import SampledAcceptGraph, lattice_of, search_outputs
from runtime.core.bundle import GraphSpec, TensorSpec
from runtime.core.options import SAMPLING_FILTERS
from runtime.core.prefix_search import kept_prefixes

# What a search hands from one frame to the next, and the other inputs of its parts.
SEARCH_STATE = tuple(
    TensorSpec(field.name, ("B", "M"), "float32" if field.name[:4] in ("prob", "ends") else "int64")
    for field in fields(Prefixes)
)
PLACES = TensorSpec("places", ("M",), "int64")
NODES = TensorSpec("nodes", ("N",), "int64")
FRAME = TensorSpec("frame", (1,), "int64")
# What the sampled accept hands from one halving to the next.
SAMPLING_STATE = tuple(field.name for field in fields(Nucleus))
# The filters that its beginning reads, and those that its end reads.
NUCLEUS_FILTERS = tuple(name for name in SAMPLING_FILTERS if name != "min_p")
DRAW_FILTERS = tuple(name for name in SAMPLING_FILTERS if name != "top_k")


class JoinedGraph:
    """A graph that grows by copies of others.

    contract: of the whole graph
    inputs: the values of its inputs, by name
    """

    def __init__(self, contract: GraphSpec):
        self.inputs = {
            t.name: ir.Value(name=t.name, shape=ir.Shape(t.shape), type=_type(t)) for t in contract.inputs
        }
        self._contract = contract
        self._nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}

    def constant(self, name: str, values: NDArray[np.int64]) -> ir.Value:
        """A tensor of whole numbers."""
        return self._initializer(name, ir.tensor(values.astype(np.int64)))

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        shape, kind = ir.Shape(tensor.shape.numpy()), ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=shape, type=kind, const_value=tensor)
        self._initializers[name] = value
        return value

    def append(self, part: ir.Model, inputs: Mapping[str, ir.Value]) -> list[ir.Value]:
        """Copy the nodes of a graph, with its inputs by name; returns its outputs."""
        copies: dict[ir.Value, ir.Value] = {}
        for value in part.graph.inputs:
            assert value.name is not None
            copies[value] = inputs[value.name]
        number = len(self._nodes)
        for value in part.graph.initializers.values():
            assert value.const_value is not None
            copies[value] = self._initializer(f"{value.name}_{number}", value.const_value)
        for node in part.graph:
            copy = ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else copies[value] for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=f"{node.op_type}_{len(self._nodes)}",
            )
            for index, (old, new) in enumerate(zip(node.outputs, copy.outputs, strict=True)):
                copies[old] = new
                new.name, new.type = f"{copy.name}_{index}", old.type
            self._nodes.append(copy)
        return [copies[value] for value in part.graph.outputs]

    def model(self, outputs: Sequence[ir.Value]) -> ir.Model:
        """The graph, in which everything is computed beforehand that follows from constants.

        outputs: in the order of the contract
        """
        for value, tensor in zip(outputs, self._contract.outputs, strict=True):
            value.name, value.shape, value.type = tensor.name, ir.Shape(tensor.shape), _type(tensor)
        graph = ir.Graph(
            list(self.inputs.values()),
            outputs,
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports={"": OPSET},
            name="joined",
        )
        model = ir.Model(graph, ir_version=10)
        fold_constants(model, onnx_shape_inference=True)
        RemoveUnusedNodesPass()(model)
        return model


def _type(tensor: TensorSpec) -> ir.TensorType:
    return ir.TensorType(ir.DataType.from_numpy(np.dtype(tensor.dtype)))


class _Part(nn.Module):
    """A function of a graph's inputs by name, as ``trace`` takes it."""

    def __init__(self, compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]]):
        super().__init__()
        self.compute = compute

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        return self.compute(inputs)


def _trace(
    compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
) -> ir.Model:
    with torch.no_grad():
        return trace(_Part(compute), GraphSpec(tuple(inputs), tuple(outputs)))


def _prefixes(inputs: Mapping[str, Tensor]) -> Prefixes:
    return Prefixes(**{tensor.name: inputs[tensor.name] for tensor in SEARCH_STATE})


class SearchGraphs:
    """Makes the search graphs of one head, for trees of any size; they compute what ``SearchGraph`` computes.

    contract: of one of these graphs (``export.step.contracts.search_contract``)
    """

    def __init__(self, contract: GraphSpec, *, merges_repeats: bool):
        lattice = [t for t in contract.inputs if t.name in LatticeTensors.__dataclass_fields__]
        given = {tensor.name: tensor for tensor in contract.inputs}
        anchor, tokens = given["anchor_ids"], given["frame_tokens"]
        self.num_frames = frames = int(tokens.shape[1])
        # The sizes of a tree are open here.
        outputs = tuple(
            TensorSpec(
                t.name, ("B", *("N" if isinstance(a, int) and a > 1 else a for a in t.shape[1:])), t.dtype
            )
            for t in contract.outputs
        )

        def begin(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            prefixes = root_prefixes(inputs["anchor_ids"], inputs["frame_tokens"], inputs["places"])
            return tuple(vars(prefixes).values())

        def read(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            before, at, places = _prefixes(inputs), inputs["frame"], inputs["places"]
            prefixes = read_frame(before, lattice_of(inputs), at, places, merges_repeats=merges_repeats)
            return tuple(vars(prefixes).values())

        def end(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
            tree = tree_of(_prefixes(inputs), inputs["anchor_ids"], inputs["nodes"], max_depth=frames)
            return search_outputs(tree, inputs["lengths"], inputs["positions"])

        self._beginning = _trace(begin, (anchor, tokens, PLACES), SEARCH_STATE)
        self._frame = _trace(read, (*lattice, *SEARCH_STATE, FRAME, PLACES), SEARCH_STATE)
        self._end = _trace(end, (*SEARCH_STATE, anchor, given["lengths"], given["positions"], NODES), outputs)

    def graph(self, contract: GraphSpec, num_nodes: int) -> ir.Model:
        """The graph of trees with ``num_nodes`` drafts."""
        joined = JoinedGraph(contract)
        inputs = joined.inputs
        places = joined.constant("places", np.arange(kept_prefixes(num_nodes)))
        state = joined.append(self._beginning, {**inputs, "places": places})
        for frame in range(self.num_frames):
            at = joined.constant(f"frame_{frame}", np.array([frame]))
            state = joined.append(self._frame, {**inputs, **_named(state), "frame": at, "places": places})
        nodes = joined.constant("nodes", np.arange(num_nodes + 1))
        outputs = joined.append(self._end, {**inputs, **_named(state), "nodes": nodes})
        return joined.model(outputs)


def _named(state: Sequence[ir.Value]) -> dict[str, ir.Value]:
    return dict(zip((tensor.name for tensor in SEARCH_STATE), state, strict=True))


def _begin_sampling(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    nucleus = widest_nucleus(inputs["logits"], *(inputs[name] for name in NUCLEUS_FILTERS))
    return tuple(vars(nucleus).values())


def _halve_nucleus(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    nucleus = halve(_nucleus(inputs))
    return nucleus.low, nucleus.high


def _nucleus(inputs: Mapping[str, Tensor]) -> Nucleus:
    return Nucleus(**{name: inputs[name] for name in SAMPLING_STATE})


def sampled_accept_graph(contract: GraphSpec, length: int) -> ir.Model:
    """The graph that computes what ``SampledAcceptGraph`` computes.

    contract: as ``export.step.contracts.accept_contract`` makes it
    """
    given = {tensor.name: tensor for tensor in contract.inputs}
    blocks = -(-int(given["logits"].shape[2]) // BLOCK)
    wide, one = ("B", "N", blocks, BLOCK), ("B", "N", 1, 1)
    state = [
        TensorSpec(name, wide if name in ("blocks", "scores", "weights") else one, "float32")
        for name in SAMPLING_STATE
    ]

    def end_sampling(inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        uniforms = inputs["uniforms"].gather(1, inputs["depths"])
        filters = (inputs[name] for name in DRAW_FILTERS)
        choices = draw(_nucleus(inputs), inputs["logits"], uniforms, *filters)
        return SampledAcceptGraph(length).accepted(inputs, choices)

    beginning = _trace(_begin_sampling, (given[name] for name in ("logits", *NUCLEUS_FILTERS)), state)
    halving = _trace(_halve_nucleus, state, state[-2:])
    end = _trace(end_sampling, (*contract.inputs, *state), contract.outputs)
    joined = JoinedGraph(contract)
    values = dict(zip(SAMPLING_STATE, joined.append(beginning, joined.inputs), strict=True))
    for _ in range(HALVINGS):
        values["low"], values["high"] = joined.append(halving, values)
    return joined.model(joined.append(end, {**joined.inputs, **values}))
