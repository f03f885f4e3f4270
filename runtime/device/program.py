"""Programs: the launches of a step and the arrays that they use, prepared once and run step after step."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.options import SAMPLING_FILTERS
from runtime.device.device import (
    BlockPool,
    Device,
    DeviceArray,
    DeviceEngine,
    Launch,
    PackedArrays,
    can_be_captured,
    write_array,
)
from runtime.device.plan import ArrayKey, GraphPass, StepPlan

LOGGER = logging.getLogger(__name__)
# What the host uploads of every slot before a step. Plain steps read the first two, only EAGLE the last.
STEP_INPUTS = ("lengths", "anchor_ids", "counts", "path_tokens")
# What the host reads of a step, and of a step whose tokens it chooses itself.
RESULTS = ("new_tokens", "new_counts", "node_log_probs", "new_log_probs")
CHOSEN_FROM = ("next_tokens", "input_ids", "parents", "depths", "node_log_probs", "logits")
# What a step that draws tokens reads of the host.
DRAWS = ("uniforms", *SAMPLING_FILTERS)
# In place of the name of a graph that accepts: the host chooses the tokens.
ON_HOST = "on the host"

Stage = tuple[str, list[Launch]]


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
        # The values that never change: the numbers of positions, and the constants of passes.
        for key, array in self._arrays.items():
            if key.tensor == "positions":
                write_array(device, array, np.arange(array.shape[0]))
        for each, _ in passes:
            for tensor, value in each.constants.items():
                write_array(device, self._arrays[each.key(tensor)], np.array([value]))

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


class Program:
    """A sequence of launches in stages, which a device may capture and repeat as one.

    The first run launches them one by one, because engines allocate memory in their first pass with new
    shapes. If one of the launches cannot be recorded, all later runs launch them one by one too.
    """

    def __init__(self, device: Device, stages: Sequence[Stage]):
        self._device = device
        self._stages = stages
        self._replay: Launch | None = None
        self._was_run = False

    def run(self, *, capture: bool) -> None:
        """Put all stages on the stream."""
        if not (capture and self._was_run):
            self._launch_all()
            self._was_run = True
            return
        if self._replay is None:
            launches = [launch for _, each in self._stages for launch in each]
            is_recorded = bool(launches) and all(map(can_be_captured, launches))
            self._replay = self._device.capture(self._launch_all) if is_recorded else self._launch_all
        self._replay()

    def run_in_stages(self) -> list[tuple[str, Any]]:
        """Launch one by one, and return the event at the end of every stage."""
        events = []
        for stage, launches in self._stages:
            for launch in launches:
                launch()
            events.append((stage, self._device.mark()))
        self._was_run = True
        return events

    def _launch_all(self) -> None:
        for _, launches in self._stages:
            for launch in launches:
                launch()


@dataclass(frozen=True)
class Step:
    """The programs of a step of some sequences and nodes, and the arrays that it exchanges with the host.

    results: what the step writes for the host, by tensor: RESULTS, or CHOSEN_FROM if the host chooses
    draws: DRAWS, which the host writes before a step that draws tokens; otherwise empty
    commit: the rest of a step once the host has chosen the tokens; None if the device chooses them
    path: where ``commit`` reads the paths along which it packs the caches, [B, P]; None for plain steps
    """

    program: Program
    results: dict[str, NDArray[Any]]
    draws: dict[str, NDArray[Any]]
    commit: Program | None = None
    path: DeviceArray | None = None


class StepPrograms:
    """Makes steps. Their results and draws share memory, since one step ends before the next begins.

    Steps that differ only in the graph that accepts share the passes of all other graphs, because an engine
    needs memory for every pass that it prepares.

    engines: those of all passes of the plan, by graph
    begin: what every step does first
    """

    def __init__(
        self,
        device: Device,
        engines: Mapping[str, DeviceEngine],
        buffers: StepBuffers,
        plan: StepPlan,
        begin: Launch,
    ):
        self._device = device
        self._engines = engines
        self._buffers = buffers
        self._plan = plan
        self._begin = begin
        self._blocks = BlockPool(device)
        self._passes: dict[tuple[object, ...], Launch] = {}
        # The indices of all nodes, by sequences and nodes.
        self._indices: dict[tuple[int, int], DeviceArray] = {}

    def make(self, count: int, nodes: int, accept: str, length: int) -> Step:
        """A step of the sequences in the first ``count`` slots.

        accept: the graph that accepts, or ``ON_HOST``
        length: tokens of the longest text, one of the plan's ``lengths``
        """
        device, plan, buffers = self._device, self._plan, self._buffers
        search, backbone = plan.verify(nodes)
        accepts = [] if accept == ON_HOST else [plan.accept(accept, nodes)]
        commits = plan.commit(nodes)
        of_pass = partial(buffers.of_pass, count=count, length=length)
        arrays = {each.graph: of_pass(each) for each in (search, backbone, *accepts, *commits)}
        arrays["backbone"]["logit_indices"] = self._all_nodes(count, nodes + 1)

        def packed(purpose: str, names: Sequence[str]) -> PackedArrays:
            """These arrays in a block, which takes the place of their own memory in every graph."""
            named = {name: array for each in arrays.values() for name, array in each.items()}
            wanted = {name: named[name] for name in names if name in named}
            found = PackedArrays(device, self._blocks, purpose, wanted)
            for each in arrays.values():
                each |= {name: array for name, array in found.on_device.items() if name in each}
            return found

        def launches(*graphs: str) -> list[Launch]:
            return [self._bound(graph, arrays[graph]) for graph in graphs]

        def draft_and_verify() -> list[Stage]:
            draft = [self._bound(each.graph, of_pass(each)) for each in plan.draft(nodes)]
            return [
                ("draft", [self._begin, *draft]),
                ("search", launches(search.graph)),
                ("verify", launches(backbone.graph)),
            ]

        if accept == ON_HOST:
            LOGGER.info("no graph draws such tokens: the host chooses those of %d sequences", count)
            results = packed("choices", CHOSEN_FROM)
            program = Program(device, [*draft_and_verify(), ("accept", [results.download])])
            commit = Program(device, [("commit", launches(*(each.graph for each in commits)))])
            path = arrays["commit"]["path"] if commits else None
            return Step(program, results.on_host, {}, commit, path)
        results, draws = packed("results", RESULTS), packed("draws", DRAWS)
        upload = [draws.upload] if draws.on_host else []
        stages = [
            *draft_and_verify(),
            ("accept", [*upload, *launches(accept)]),
            ("commit", launches(*(each.graph for each in commits))),
            ("read", [results.download]),
        ]
        return Step(Program(device, stages), results.on_host, draws.on_host)

    def clear(self) -> None:
        """Forget all passes, which keep their engines alive."""
        self._passes.clear()

    def _all_nodes(self, count: int, size: int) -> DeviceArray:
        """[B, N] of 0, 1, ...: the target model's choices are read after every node."""
        found = self._indices.get((count, size))
        if found is None:
            found = self._indices[count, size] = self._device.allocate((count, size), "int64")
            write_array(self._device, found, np.tile(np.arange(size), (count, 1)))
        return found

    def _bound(self, graph: str, arrays: Mapping[str, DeviceArray]) -> Launch:
        key = graph, *arrays.items()
        if key not in self._passes:
            self._passes[key] = self._engines[graph].bind(arrays)
        return self._passes[key]
