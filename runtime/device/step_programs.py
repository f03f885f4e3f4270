"""The programs of steps: which launches make a step of so many sequences and nodes, on which arrays."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.device import Device, DeviceArray, DeviceEngine, write_array
from runtime.device.program import BlockPool, Launch, PackedArrays, Program, Stage
from runtime.device.step_buffers import StepBuffers
from runtime.device.step_plan import StepPlan

LOGGER = logging.getLogger(__name__)
# What the host reads of a step, and of one whose tokens it chooses itself.
RESULTS = ("new_tokens", "new_counts", "node_log_probs", "new_log_probs")
CHOSEN_FROM = ("next_tokens", "input_ids", "parents", "depths", "node_log_probs", "logits")
# What a step that draws tokens reads of the host.
DRAWS = ("uniforms", "temperature", "top_k", "top_p", "min_p")
# The graphs that accept, the one with more results first; and what stands in place of one if the host does.
ACCEPT_GRAPHS = ("accept_sampled", "accept")
ON_HOST = "on the host"


@dataclass(frozen=True)
class Step:
    """The programs of a step of some sequences and nodes, and the arrays that it exchanges with the host.

    draws: what the step reads of the host, if it draws tokens
    commit: what follows when the host has chosen the tokens; None where the device chooses them
    """

    program: Program
    results: dict[str, NDArray[Any]]
    draws: dict[str, NDArray[Any]]
    commit: Program | None = None


class StepPrograms:
    """Makes steps. Their results and draws share memory, since one step ends before the next begins.

    Steps that differ in the graph that accepts share the passes of all other graphs, because an engine needs
    memory for every pass that it prepares.

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

    def make(self, count: int, nodes: int, accept: str) -> Step:
        """A step of the sequences in the first ``count`` slots.

        accept: the graph that accepts, or ``ON_HOST``
        """
        device, plan, buffers = self._device, self._plan, self._buffers
        search, backbone = plan.verify(nodes)
        accepts = [] if accept == ON_HOST else [plan.accept(accept, nodes)]
        commits = plan.commit(nodes)
        arrays = {each.graph: buffers.of_pass(each, count) for each in (search, backbone, *accepts, *commits)}
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
            draft = [self._bound(each.graph, buffers.of_pass(each, count)) for each in plan.draft(nodes)]
            return [
                ("draft", [self._begin, *draft]),
                ("search", launches(search.graph)),
                ("verify", launches(backbone.graph)),
            ]

        if accept == ON_HOST:
            LOGGER.info("no graph draws such tokens: the host chooses those of %d sequences", count)
            results = packed("choices", CHOSEN_FROM)
            program = Program(device, [*draft_and_verify(), ("accept", [results.download])])
            committed = launches(*(each.graph for each in commits))
            return Step(program, results.on_host, {}, Program(device, [("commit", committed)]))
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
        """Forget all passes, which keep their engines."""
        self._passes.clear()

    def _all_nodes(self, count: int, size: int) -> DeviceArray:
        """The model's choices are wanted after every node: [B, N] of 0, 1, ..."""
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
