"""Which graphs a step on a device runs for trees of every size, in which order, and on which arrays.

An autoregressive head takes a pass for the root and one for every further level. Between them the graph
``expand`` chooses the nodes of the next level. The results of each pass stay in arrays of its depth, because
the search at the end chooses among all of them.

Attention of a step reads the caches up to the length in use. So steps exist for a few lengths of the longest
text (``StepPlan.lengths``), and the arrays of all of them are views of the same memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from runtime.core.bundle import (
    DRAFT,
    PARALLEL,
    PLAIN,
    Bundle,
    DrafterSpec,
    GraphSpec,
    drafter_capacity,
    rounded_capacity,
    target_model_capacity,
)
from runtime.core.errors import RequestError
from runtime.core.options import MAX_PREFILL_CHUNK, PROMPT_SIZES
from runtime.decode.step import StepRunner
from runtime.device.device import DeviceArray

# The graphs that accept, the one with more results first.
ACCEPT_GRAPHS = ("accept_sampled", "accept")
# Positions that the passes for the shortest texts read of a cache; each further length reads twice as many.
SHORTEST_READ = 512
# Where a head reads a step's context: the features of the last step's path, and the tokens after them.
CONTEXT = {"features": "path_features", "context_token_ids": "path_tokens"}
# The outputs of an autoregressive head for every node.
CHILDREN = ("child_tokens", "child_logprobs")
# Inputs that the head and the target model have under the same names, each with values of its own.
OWN_INPUTS = ("attn_mask", "write_index", "positions", "position_ids")


@dataclass(frozen=True)
class ArrayKey:
    """One array of a step. Tensors with the same key are the same memory, whatever their graphs.

    tensor: the name of a tensor that is stored there
    of_head: whether it is the draft head's own; the target model has another array of the same tensor
    """

    tensor: str
    of_head: bool = False

    @property
    def is_cache(self) -> bool:
        """Whether it holds the keys or values of a layer, [B, KH, S, D]."""
        return self.tensor.startswith("past_")


@dataclass(frozen=True)
class GraphPass:
    """One run of a graph.

    axes: sizes of its open axes but those of sequences and caches
    stored_as: the array's tensor, where a tensor of the graph is stored under the name of another graph's
    constants: values of inputs of one element that never change
    of_head: whether the graph reads the head's cache, mask and positions, and not the target model's
    """

    graph: str
    axes: Mapping[str, int] = field(default_factory=dict)
    stored_as: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, int] = field(default_factory=dict)
    of_head: bool = False

    def key(self, tensor: str) -> ArrayKey:
        """The array of a tensor. A cache is updated in place, so its output has the key of its input."""
        if tensor in self.stored_as:
            return ArrayKey(self.stored_as[tensor])
        key = ArrayKey(tensor.replace("present_", "past_"))
        is_own = self.of_head and (key.is_cache or tensor in OWN_INPUTS)
        return ArrayKey(key.tensor, of_head=is_own)


@dataclass(frozen=True)
class ParallelPasses:
    """The passes of a head that drafts all frames in one pass.

    path_length: tokens that a step adds to the context at most
    """

    spec: DrafterSpec
    path_length: int

    def draft(self, num_nodes: int) -> Sequence[GraphPass]:
        """The passes that draft a tree of so many nodes; for 0 nodes, those that only read the context."""
        axes = {"A": self.path_length, "T": self.spec.num_frames}
        return GraphPass("prepare", of_head=True), GraphPass("drafter", axes, CONTEXT, of_head=True)

    def read(self, num_tokens: int) -> GraphPass:
        """The pass over so many tokens of a prompt; its drafts are not used."""
        return GraphPass("drafter", {"A": num_tokens, "T": 1}, of_head=True)


@dataclass(frozen=True)
class AutoregressivePasses:
    """Those of an autoregressive head, which drafts level by level."""

    spec: DrafterSpec
    path_length: int

    def draft(self, num_nodes: int) -> Sequence[GraphPass]:
        passes = [GraphPass("prepare", of_head=True), self._level(0)]
        for depth in range(1, min(num_nodes, self.spec.num_frames)):
            passes += [self._expand(depth), self._level(depth)]
        return passes

    def read(self, num_tokens: int) -> GraphPass:
        return GraphPass("drafter", self._root_axes(num_tokens), of_head=True)

    def _level(self, depth: int) -> GraphPass:
        """The head's pass over the nodes of a depth; over the root it reads the new context too."""
        stored_as = {**CONTEXT, **_at_depth(CHILDREN, depth), "path_ids_0": "anchor_ids"}
        if depth:
            return GraphPass("drafter", self._level_axes(depth), stored_as, of_head=True)
        if self.spec.heads_per_depth:  # all levels read the root's state
            stored_as["new_states"] = "states"
        return GraphPass("drafter", self._root_axes(self.path_length), stored_as, of_head=True)

    def _expand(self, depth: int) -> GraphPass:
        """From the pass above to the nodes of a depth. The root's score and reach are 0, as new memory is."""
        stored_as = {
            **_at_depth((*CHILDREN, "frontier_scores", "reach"), depth - 1),
            **_at_depth(("chosen", "depth"), depth),
            "next_scores": f"frontier_scores_{depth}",
            "next_reach": f"reach_{depth}",
            "node_features": "new_states",
            "parent_features": "states",
            "paths": f"path_ids_{depth - 1}" if depth > 1 else "anchor_ids",
            "next_paths": f"path_ids_{depth}",
        }
        axes = {"W": self.spec.beam_width if depth > 1 else 1, "L": depth, "L1": depth + 1}
        constants = {} if self.spec.heads_per_depth else {"depth": depth}
        return GraphPass("expand", axes, stored_as, constants, of_head=True)

    def _root_axes(self, num_tokens: int) -> dict[str, int]:
        axes = {"A": num_tokens, "Q": 1, "N": 0, "P": 1, "M": 1}
        return axes | {f"M{depth}": int(depth == 0) for depth in range(self.spec.num_frames)}

    def _level_axes(self, depth: int) -> dict[str, int]:
        width = self.spec.beam_width
        states = 1 if self.spec.heads_per_depth else width
        axes = {"A": 0, "Q": 0, "N": states, "P": states, "M": width}
        return axes | {f"M{d}": width if d == depth else 0 for d in range(self.spec.num_frames)}


def _at_depth(tensors: Sequence[str], depth: int) -> dict[str, str]:
    """Tensors of a pass, each with the tensor of the search that reads the results of its depth."""
    return {tensor: f"{tensor}_{depth}" for tensor in tensors}


@dataclass(frozen=True)
class StepPlan:
    """What a bundle's steps run, and for how many sequences and tokens.

    contracts: of all graphs that run, by name
    nodes: draft nodes of a tree, ascending from 0
    path_length: P, new tokens of a step at most
    max_num_seqs: slots
    max_length: tokens of the longest text
    prefill_chunk_size: tokens of a prompt that one pass reads at most
    capacity: positions of a slot in the target model's cache
    room: positions behind a text that a step may write and read
    lengths: of the longest text, for each of which there are steps, ascending to ``max_length``
    head: None for plain steps
    head_capacity, head_room: the same of the head's cache
    """

    contracts: Mapping[str, GraphSpec]
    nodes: tuple[int, ...]
    path_length: int
    max_num_seqs: int
    max_length: int
    prefill_chunk_size: int
    capacity: int
    room: int
    lengths: tuple[int, ...]
    head: ParallelPasses | AutoregressivePasses | None = None
    head_capacity: int = 0
    head_room: int = 0

    def length_for(self, longest: int) -> int:
        """The least of ``lengths`` for texts of so many tokens."""
        return next((length for length in self.lengths if length >= longest), self.max_length)

    @property
    def head_has_cache(self) -> bool:
        """Whether the head keeps keys and values of its context; otherwise it reads no prompts."""
        return self.head is not None and bool(_cache_shapes(self.contracts["drafter"]))

    def draft(self, nodes: int) -> Sequence[GraphPass]:
        """The head's passes."""
        return self.head.draft(nodes) if self.head else ()

    def verify(self, nodes: int) -> tuple[GraphPass, GraphPass]:
        """The search, and the target model's pass over the tree that it finds."""
        axes = {"N": nodes + 1, "M": nodes + 1}
        return GraphPass(f"search_{nodes}"), GraphPass("backbone", axes, {"write_index": "lengths"})

    def accept(self, graph: str, nodes: int) -> GraphPass:
        """graph: one of ACCEPT_GRAPHS"""
        return GraphPass(graph, {"N": nodes + 1})

    def commit(self, nodes: int) -> Sequence[GraphPass]:
        """Without a head there is no path to pack."""
        return (GraphPass("commit", {"N": nodes + 1}),) if self.head else ()

    def step_passes(self) -> list[GraphPass]:
        """The passes of steps of every size."""
        return [
            each
            for nodes in self.nodes
            for each in (
                *self.draft(nodes),
                *self.verify(nodes),
                *(self.accept(graph, nodes) for graph in ACCEPT_GRAPHS),
                *self.commit(nodes),
            )
        ]

    def prompt_passes(self, num_tokens: int) -> list[GraphPass]:
        """The passes over a part of a prompt."""
        backbone = GraphPass("backbone", {"N": num_tokens, "M": 1})
        return [backbone, self.head.read(num_tokens)] if self.head else [backbone]

    def shapes(
        self, graph_pass: GraphPass, num_seqs: int, length: int | None = None
    ) -> dict[str, DeviceArray]:
        """Shape and type of every tensor of a pass, by name, as arrays without memory.

        length: tokens of the longest text, one of ``lengths``; by default ``max_length``
        """
        capacity = self.head_capacity if graph_pass.of_head else self.capacity
        room = self.head_room if graph_pass.of_head else self.room
        read = min(rounded_capacity((length or self.max_length) + room), capacity)
        sizes = {**graph_pass.axes, "S": capacity, "R": read, "B": num_seqs}
        contract = self.contracts[graph_pass.graph]
        return {
            tensor.name: DeviceArray(
                0,
                tuple(axis if isinstance(axis, int) else sizes[axis] for axis in tensor.shape),
                tensor.dtype,
            )
            for tensor in (*contract.inputs, *contract.outputs)
        }


def plan_steps(bundle: Bundle, method: str, *, max_num_seqs: int, max_length: int) -> StepPlan:
    """The plan of a bundle's steps, of the method ``draft`` or ``plain``.

    Raises RequestError for a bundle without the graphs, and for limits beyond those of compiled engines.
    """
    manifest = bundle.manifest
    spec, limits = manifest.drafter, manifest.engine_plan
    if spec and spec.drafts_in_verify_pass and (method == DRAFT or not manifest.step_nodes):
        raise RequestError(
            f"step: {bundle.path} holds streams of the verify pass, whose steps run on the host"
        )
    if not manifest.step_nodes:
        raise RequestError(
            f"step: {bundle.path} has no graphs of steps on a device; export it again with --step-nodes"
        )
    spec = spec if method == DRAFT else None
    nodes = manifest.step_nodes if spec else (0,)
    names = ["backbone", "accept", "accept_sampled", *(f"search_{count}" for count in nodes)]
    if spec:
        names += ["drafter", "prepare", "commit"]
        names += [name for name in ("expand",) if name in manifest.graphs]
    missing = [name for name in names if name not in manifest.graphs]
    if missing:
        raise RequestError(
            f"step: {bundle.path} has no graphs {', '.join(missing)}; export it again with --step-nodes, or "
            "decode with the method plain"
        )
    if limits:
        for name, value, most in (
            ("max_num_seqs", max_num_seqs, limits.max_num_seqs),
            ("max_length", max_length, limits.max_context),
        ):
            if value > most:
                raise RequestError(f"{name}: the engines were compiled for at most {most}, got {value}")
    contracts = {name: manifest.graphs[name] for name in names}
    (path_length,) = {t.shape[1] for t in contracts["accept"].outputs if t.name == "path"}
    assert isinstance(path_length, int)
    chunk = min(limits.prefill_chunk if limits else MAX_PREFILL_CHUNK, max_length)
    # Behind the text is room for a whole tree, and for the padding of the shortest passes over prompts.
    padding = min(chunk, PROMPT_SIZES[0])
    room = target_model_capacity(0, max(nodes[-1], padding), path_length)
    plan = StepPlan(
        contracts,
        nodes,
        path_length,
        max_num_seqs,
        max_length,
        chunk,
        _fixed_capacity(contracts["backbone"]) or rounded_capacity(max_length + room),
        room,
        _lengths(max_length, room) if reads_parts(contracts["backbone"]) else (max_length,),
    )
    if spec is None:
        return plan
    room = drafter_capacity(
        0,
        padding=max(path_length, padding),
        family=spec.family,
        num_frames=spec.num_frames,
        beam_width=spec.beam_width,
    )
    make = ParallelPasses if spec.family == PARALLEL else AutoregressivePasses
    return replace(
        plan,
        head=make(spec, path_length),
        head_capacity=_fixed_capacity(contracts["drafter"]) or rounded_capacity(max_length + room),
        head_room=room,
    )


def reads_parts(contract: GraphSpec) -> bool:
    """Whether passes of a graph can read a part of its caches, as many positions as its mask has columns."""
    return any("R" in tensor.shape for tensor in contract.inputs)


def _lengths(max_length: int, room: int) -> tuple[int, ...]:
    """As of ``StepPlan``, without lengths whose passes read nearly as much as those of ``max_length``."""
    most, read = rounded_capacity(max_length + room), SHORTEST_READ
    found = []
    while 4 * read <= 3 * most:
        if read > room:
            found.append(read - room)
        read *= 2
    return *found, max_length


def _cache_shapes(contract: GraphSpec) -> list[tuple[int | str, ...]]:
    return [tensor.shape for tensor in contract.inputs if tensor.name.startswith("past_")]


def _fixed_capacity(contract: GraphSpec) -> int | None:
    """Positions of a slot's cache, if the contract fixes them."""
    positions = next((shape[2] for shape in _cache_shapes(contract)), None)
    return positions if isinstance(positions, int) else None


def size_that_runs(step_nodes: Sequence[int], wanted: int) -> int:
    """The smallest exported size of at least ``wanted`` nodes, or else the largest.

    step_nodes: ascending, of ``BundleManifest``
    """
    return next((size for size in step_nodes if size >= wanted), step_nodes[-1])


def explain_size(
    bundle: Bundle, runner: StepRunner, method: str | None, wanted: int
) -> tuple[int, str | None]:
    """The nodes that a step of ``wanted`` nodes has, and a message if these are others."""
    sizes = runner.tree_sizes
    if not sizes or method == PLAIN or bundle.manifest.drafter is None:
        return wanted, None
    size = size_that_runs(sizes, wanted)
    if size == wanted:
        return size, None
    exported = ", ".join(str(each) for each in sizes if each)
    return (
        size,
        f"--num-nodes: steps have {size} nodes in place of {wanted}; the bundle has graphs for {exported}",
    )
