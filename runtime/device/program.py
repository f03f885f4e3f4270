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
from runtime.device.plan import StepBuffers, StepPlan

LOGGER = logging.getLogger(__name__)
# What the host reads of a step, and of a step whose tokens it chooses itself.
RESULTS = ("new_tokens", "new_counts", "node_log_probs", "new_log_probs")
CHOSEN_FROM = ("next_tokens", "input_ids", "parents", "depths", "node_log_probs", "logits")
# What a step that draws tokens reads of the host.
DRAWS = ("uniforms", *SAMPLING_FILTERS)
# In place of the name of a graph that accepts: the host chooses the tokens.
ON_HOST = "on the host"

Stage = tuple[str, list[Launch]]


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
            self._replay = self._recorded()
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

    def _recorded(self) -> Launch:
        """All stages as one launch, if there is something that the device can record."""
        launches = [launch for _, each in self._stages for launch in each]
        if launches and all(map(can_be_captured, launches)):
            return self._device.capture(self._launch_all)
        return self._launch_all

    def _launch_all(self) -> None:
        for _, launches in self._stages:
            for launch in launches:
                launch()


@dataclass(frozen=True)
class HostChoice:
    """The rest of a step whose tokens the host has chosen.

    commit: packs the caches along the paths
    path: where it reads them, [B, P]; None for plain steps, which pack nothing
    """

    commit: Program
    path: DeviceArray | None


@dataclass(frozen=True)
class Step:
    """The programs of a step of some sequences and nodes, and the arrays that it exchanges with the host.

    results: what the step writes for the host, by tensor: RESULTS, or CHOSEN_FROM if the host chooses
    draws: DRAWS, which the host writes before a step that draws tokens; otherwise empty
    host_choice: what follows once the host has chosen the tokens; None if the device chooses them
    """

    program: Program
    results: dict[str, NDArray[Any]]
    draws: dict[str, NDArray[Any]]
    host_choice: HostChoice | None = None


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
            return Step(program, results.on_host, {}, HostChoice(commit, path))
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
