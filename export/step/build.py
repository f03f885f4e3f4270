"""All step-logic graphs of a device, by name: traced, written, and each with a check against PyTorch.

A step-logic graph has no weights. It prepares a pass of the head, turns drafts into a tree, expands a level,
accepts a path, or commits it to the caches (``export.step.modules``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn

from drafters.config import DrafterConfig
from drafters.head_types import AUTOREGRESSIVE, PARALLEL
from export.background import BackgroundProcess
from export.forms import GraphFile, GraphForm, WrittenGraph, save_graph, step_form
from export.graphs.layers import scattered
from export.graphs.trace import silence_libraries, trace_standard
from export.options import Options
from export.step import contracts, modules
from export.step.joined_graphs import SearchGraphs, sampled_accept_graph
from export.verify.runner import GraphRunner
from export.verify.step import check_step, random_inputs, step_reference
from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec
from runtime.core.prefix_search import kept_prefixes

# The most elements from which TensorRT chooses the best.
MAX_TOP_K_ELEMENTS = 3840


@dataclass(frozen=True)
class StepCheck:
    """Compares a written graph with PyTorch, on random inputs. It can be sent to another process.

    contract: in float32
    """

    module: nn.Module
    contract: GraphSpec

    def __call__(self, graph: GraphRunner) -> dict[str, float]:
        inputs = random_inputs(self.contract, graph.capacity)
        return check_step(graph, inputs, step_reference(self.module, self.contract, inputs))


# A float32 graph, with its name and its check.
StepGraph = tuple[str, ir.Model, StepCheck]
# A head with which a device can draft by itself, and its contract.
DeviceDrafter = tuple[DrafterSpec, GraphSpec]


@dataclass(frozen=True)
class DraftSteps:
    """How a device drafts with the heads of a family: the step-logic graphs around the graph of the head.

    searches: the graphs from drafts to trees; takes the head, its contract and the sizes of trees
    num_elements: among how many elements a search for so many drafts chooses
    """

    searches: Callable[[DrafterSpec, GraphSpec, tuple[int, ...]], Iterator[StepGraph]]
    num_elements: Callable[[DrafterConfig, Options, int], int]


def step_graphs(
    model: ModelSpec, backbone: GraphSpec, drafter: DeviceDrafter | None, step_nodes: tuple[int, ...]
) -> Iterator[StepGraph]:
    """The graphs of plain steps, and of steps that verify so many nodes.

    step_nodes: sizes of trees, as ``export.heads.check_step_nodes`` accepts them
    The contracts are those in float32. Searches come first, because compilers need long for them.
    """
    if not step_nodes:
        return
    if drafter and step_nodes[1:]:
        spec, of_head = drafter
        yield from STEPS[spec.family].searches(spec, of_head, step_nodes[1:])
    length = contracts.path_length(drafter[0] if drafter else None)
    yield _traced("search_0", modules.SearchGraph(0), contracts.search_contract((), 0))
    yield _traced(
        "accept", modules.AcceptGraph(length), contracts.accept_contract(model, length, sampled=False)
    )
    contract = contracts.accept_contract(model, length, sampled=True)
    sampled = sampled_accept_graph(contract, length)
    yield "accept_sampled", sampled, StepCheck(modules.SampledAcceptGraph(length), contract)
    if drafter is None:
        return
    spec, of_head = drafter
    contract = contracts.prepare_contract(of_head, spec)
    yield _traced("prepare", modules.PrepareGraph(contract, spec, length), contract)
    contract = contracts.commit_contract(backbone, model, length)
    commit = trace_standard(modules.CommitGraph(), contract)
    yield "commit", commit, StepCheck(modules.CommitGraph(scattered), contract)


def _lattice_searches(spec: DrafterSpec, drafter: GraphSpec, sizes: tuple[int, ...]) -> Iterator[StepGraph]:
    searches = {
        nodes: contracts.search_contract(contracts.lattice_inputs(drafter, spec), nodes) for nodes in sizes
    }
    makes = SearchGraphs(searches[sizes[0]], merges_repeats=spec.merges_repeats)
    for nodes, contract in searches.items():
        module = modules.SearchGraph(nodes, merges_repeats=spec.merges_repeats)
        yield f"search_{nodes}", makes.graph(contract, nodes), StepCheck(module, contract)


def _lattice_elements(config: DrafterConfig, options: Options, num_nodes: int) -> int:
    """Prefixes of a frame."""
    return kept_prefixes(num_nodes) * (config.frame_top_k(options.top_k) + 1)


def _level_searches(spec: DrafterSpec, drafter: GraphSpec, sizes: tuple[int, ...]) -> Iterator[StepGraph]:
    if contracts.num_levels(spec, sizes[-1]) > 1:
        yield _traced("expand", modules.ExpandGraph(spec), contracts.expand_contract(drafter, spec))
    for nodes in sizes:
        contract = contracts.search_contract(contracts.level_inputs(spec, nodes), nodes)
        yield _traced(f"search_{nodes}", modules.LevelSearchGraph(nodes), contract)


def _level_elements(config: DrafterConfig, options: Options, num_nodes: int) -> int:
    """Children of all passes."""
    passes_below = min(num_nodes, config.num_frames) - 1
    return max(num_nodes, options.top_k * (1 + options.beam_width * passes_below))


# By the family of a head: of heads that give a lattice in one pass, and of heads that give a level in each
# pass. A device cannot run the steps of others by itself.
STEPS = {
    PARALLEL: DraftSteps(_lattice_searches, _lattice_elements),
    AUTOREGRESSIVE: DraftSteps(_level_searches, _level_elements),
}


def _traced(name: str, module: nn.Module, contract: GraphSpec) -> StepGraph:
    return name, trace_standard(module, contract), StepCheck(module, contract)


Arguments = tuple[Path, dict[str, GraphForm], ModelSpec, GraphSpec, DeviceDrafter | None, tuple[int, ...]]


def write_step_graphs(
    directory: Path,
    forms: dict[str, GraphForm],
    model: ModelSpec,
    backbone: GraphSpec,
    drafter: DeviceDrafter | None,
    step_nodes: tuple[int, ...],
) -> Iterator[GraphFile]:
    """Trace and write one graph after another; none if there are no sizes.

    forms: of the target model and the head, by the graphs' names
    The other arguments are those of ``step_graphs``.
    """
    for name, graph, check in step_graphs(model, backbone, drafter, step_nodes):
        path, form = directory / f"{name}.onnx", step_form(name, forms)
        yield GraphFile(save_graph(graph, check.contract, path, form, has_weights=False), check)


def _write_silently(*arguments: Any) -> Iterator[GraphFile]:
    silence_libraries()
    yield from write_step_graphs(*arguments)


@contextmanager
def step_files(
    arguments: Arguments, on_graph: Callable[[WrittenGraph], None], *, parallel: bool
) -> Iterator[Callable[[], list[GraphFile]]]:
    """Writes the files of ``write_step_graphs``; gives a function that waits for them and returns them.

    on_graph: called with each as soon as it is written
    parallel: write them in a process of their own, beside what is done in the block
    """
    # The graphs of plain steps alone take less time than starting a process.
    if parallel and len(arguments[-1]) > 1:
        with BackgroundProcess(_write_silently, arguments, lambda file: on_graph(file.written)) as process:
            yield process.results
        return
    files = []
    for file in write_step_graphs(*arguments):
        files.append(file)
        on_graph(file.written)
    yield lambda: files
