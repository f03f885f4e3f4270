"""The search as one ONNX graph of fixed shape, put together from three that are traced once.

torch.export takes half a minute for a search over twelve frames. All frames compute the same, and trees of
different sizes differ in two constants, so the beginning, one frame and the end are traced with open sizes.
They are joined, frame after frame, for every size of a tree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from drafters.lattice import LatticeTensors
from export.graphs.joining import JoinedGraph
from export.graphs.trace import trace
from export.step.modules import lattice_of, search_outputs
from export.step.search import Prefixes, kept_prefixes, read_frame, root_prefixes, tree_of
from runtime.core.bundle import GraphSpec, TensorSpec

STATE = tuple(
    TensorSpec(field.name, ("B", "M"), "float32" if field.name[:4] in ("prob", "ends") else "int64")
    for field in fields(Prefixes)
)
PLACES = TensorSpec("places", ("M",), "int64")
NODES = TensorSpec("nodes", ("N",), "int64")
FRAME = TensorSpec("frame", (1,), "int64")


class _Beginning(nn.Module):
    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        prefixes = root_prefixes(inputs["anchor_ids"], inputs["frame_tokens"], inputs["places"])
        return tuple(vars(prefixes).values())


class _Frame(nn.Module):
    def __init__(self, merges_repeats: bool):
        super().__init__()
        self.merges_repeats = merges_repeats

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        prefixes = read_frame(
            _prefixes(inputs),
            lattice_of(inputs),
            inputs["frame"],
            inputs["places"],
            merges_repeats=self.merges_repeats,
        )
        return tuple(vars(prefixes).values())


class _End(nn.Module):
    def __init__(self, max_depth: int):
        super().__init__()
        self.max_depth = max_depth

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        tree = tree_of(_prefixes(inputs), inputs["anchor_ids"], inputs["nodes"], max_depth=self.max_depth)
        return search_outputs(tree, inputs["lengths"], inputs["positions"])


def _prefixes(inputs: Mapping[str, Tensor]) -> Prefixes:
    return Prefixes(**{tensor.name: inputs[tensor.name] for tensor in STATE})


class SearchGraphs:
    """Makes the search graphs of one head, for trees of any size.

    contract: of one of these graphs (``export.step.contracts.search_contract``)
    """

    def __init__(self, contract: GraphSpec, *, merges_repeats: bool):
        lattice = [t for t in contract.inputs if t.name in LatticeTensors.__dataclass_fields__]
        given = {tensor.name: tensor for tensor in contract.inputs}
        (frames,) = {tensor.shape[1] for tensor in lattice if tensor.name == "frame_tokens"}
        assert isinstance(frames, int)
        self.num_frames = frames
        anchor, tokens = given["anchor_ids"], given["frame_tokens"]
        ends = (*STATE, anchor, given["lengths"], given["positions"], NODES)
        # The sizes of a tree are open here.
        outputs = tuple(
            TensorSpec(
                t.name, ("B", *("N" if isinstance(a, int) and a > 1 else a for a in t.shape[1:])), t.dtype
            )
            for t in contract.outputs
        )
        with torch.no_grad():
            self._beginning = trace(_Beginning(), GraphSpec((anchor, tokens, PLACES), STATE))
            self._frame = trace(_Frame(merges_repeats), GraphSpec((*lattice, *STATE, FRAME, PLACES), STATE))
            self._end = trace(_End(frames), GraphSpec(ends, outputs))

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
    return dict(zip((tensor.name for tensor in STATE), state, strict=True))
