"""Which graphs a step on a device runs for trees of every size, in which order, and the arrays they share.

Attention of a step reads the caches up to the length in use. So steps exist for a few lengths of the longest
text (``StepPlan.lengths``), and the arrays of all of them are views of the same memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.core.bundle import (
    DRAFT,
    PARALLEL,
    PLAIN,
    Bundle,
    GraphSpec,
    drafter_capacity,
    rounded_capacity,
    target_model_capacity,
)
from runtime.core.errors import RequestError
from runtime.core.options import MAX_PREFILL_CHUNK, PROMPT_SIZES
from runtime.decode.step import StepRunner
from runtime.device.device import BlockPool, Device, DeviceArray, PackedArrays, write_array
from runtime.device.passes import ArrayKey, GraphPass, HeadPasses, LevelPasses, ParallelPasses

# What the host uploads of every slot before a step. Plain steps read the first two, only EAGLE the last.
STEP_INPUTS = ("lengths", "anchor_ids", "counts", "path_tokens")
# The graphs that accept, the one with more results first.
ACCEPT_GRAPHS = ("accept_sampled", "accept")
# Positions that the passes for the shortest texts read of a cache; each further length reads twice as many.
SHORTEST_READ = 512


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
    head: HeadPasses | None = None
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
    make = ParallelPasses if spec.family == PARALLEL else LevelPasses
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


class StepBuffers:
    """The arrays that the graphs of a step share, each as large as its largest use.

    One graph reads what another one wrote, because tensors with the same key have the same array.

    inputs: the arrays of STEP_INPUTS, which one upload brings to the device
    caches, head_caches: keys and values of all layers of the target model and of the head, [B, KH, S, D] each
    path_features: [B, P, F], of the last step's path; None without a head
    slot_arrays: all of these, of which every slot has a row
    spare_row: memory for the largest of these rows
    """

    def __init__(self, device: Device, plan: StepPlan):
        self._plan = plan
        passes = [(each, plan.max_num_seqs) for each in plan.step_passes()]
        passes += [(each, 1) for each in plan.prompt_passes(plan.prefill_chunk_size)]
        largest: dict[ArrayKey, DeviceArray] = {}
        for each, count in passes:
            for tensor, array in plan.shapes(each, count).items():
                key = each.key(tensor)
                if key not in largest or array.nbytes > largest[key].nbytes:
                    largest[key] = array
        inputs = {name: largest.pop(ArrayKey(name)) for name in STEP_INPUTS if ArrayKey(name) in largest}
        self.inputs = PackedArrays(device, BlockPool(device), "inputs", inputs)
        self._arrays = {key: device.allocate(each.shape, each.dtype) for key, each in largest.items()}
        self._arrays |= {ArrayKey(name): array for name, array in self.inputs.on_device.items()}
        caches = [(key.of_head, array) for key, array in self._arrays.items() if key.is_cache]
        self.caches = [array for of_head, array in caches if not of_head]
        self.head_caches = [array for of_head, array in caches if of_head]
        self.path_features = self._arrays.get(ArrayKey("path_features"))
        self.slot_arrays = [
            *self.caches,
            *self.head_caches,
            *([self.path_features] if self.path_features else []),
        ]
        largest_row = max((array.rows(0, 1).nbytes for array in self.slot_arrays), default=0)
        self.spare_row = device.allocate((largest_row,), "bool")
        self._write_constants(device, [each for each, _ in passes])

    def shared(self, tensor: str) -> DeviceArray:
        """The array of a tensor that is not the head's own, in the shape of its largest use."""
        return self._arrays[ArrayKey(tensor)]

    def of_pass(
        self, graph_pass: GraphPass, count: int, *, slot: int = 0, length: int | None = None
    ) -> dict[str, DeviceArray]:
        """The arrays of a pass of ``count`` sequences by tensor, with the caches from ``slot`` on.

        length: as of ``StepPlan.shapes``
        """
        result = {}
        for tensor, wanted in self._plan.shapes(graph_pass, count, length).items():
            key = graph_pass.key(tensor)
            array = self._arrays[key]
            result[tensor] = array.rows(slot, slot + count) if key.is_cache else array.view(wanted.shape)
        return result

    def _write_constants(self, device: Device, passes: Sequence[GraphPass]) -> None:
        """Write the values that never change: the numbers of positions, and the constants of passes."""
        for key, array in self._arrays.items():
            if key.tensor == "positions":
                write_array(device, array, np.arange(array.shape[0]))
        for each in passes:
            for tensor, value in each.constants.items():
                write_array(device, self._arrays[each.key(tensor)], np.array([value]))


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
