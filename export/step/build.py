"""All weightless graphs of a step on a device, by name, each with a check against PyTorch."""

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir
from torch import nn

from drafters.config import DrafterConfig
from drafters.lattice import frame_top_k
from export.errors import ExportError
from export.graphs.operators import scattered
from export.graphs.trace import trace_standard
from export.options import Options
from export.step.contracts import (
    accept_contract,
    commit_contract,
    expand_contract,
    num_levels,
    path_length,
    prepare_contract,
    search_contract,
)
from export.step.level_modules import ExpandGraph, LevelSearchGraph, PrepareRootGraph
from export.step.modules import AcceptGraph, CommitGraph, PrepareGraph, SearchGraph
from export.step.sampled_accept import SampledAcceptGraph, sampled_accept_graph
from export.step.search import kept_prefixes
from export.step.search_graph import SearchGraphs
from export.verify.graph_runner import GraphRunner
from export.verify.step import check_step, random_inputs, step_reference
from runtime.core.bundle import AUTOREGRESSIVE, STREAMING, DrafterSpec, GraphSpec, ModelSpec

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
        return check_step(graph, step_reference(self.module, self.contract, inputs))


@dataclass(frozen=True)
class StepGraph:
    """A float32 graph and its tensors."""

    model: ir.Model
    contract: GraphSpec
    check: StepCheck


def step_graphs(
    model: ModelSpec,
    backbone: GraphSpec,
    drafter: tuple[DrafterSpec, GraphSpec] | None,
    step_nodes: tuple[int, ...],
) -> Iterator[tuple[str, StepGraph]]:
    """The graphs of plain steps, and of steps that verify so many nodes, each with its name.

    step_nodes: sizes of trees, as ``check_step_nodes`` accepts them
    The contracts are those in float32. Searches come first, because compilers need long for them.
    """
    if not step_nodes:
        return
    if drafter:
        yield from _searches(*drafter, step_nodes[1:])
    length = path_length(drafter[0] if drafter else None)
    yield "search_0", _traced(SearchGraph(0), search_contract(None, None, 0))
    yield "accept", _traced(AcceptGraph(length), accept_contract(model, length, sampled=False))
    contract = accept_contract(model, length, sampled=True)
    yield (
        "accept_sampled",
        StepGraph(
            sampled_accept_graph(contract, length), contract, StepCheck(SampledAcceptGraph(length), contract)
        ),
    )
    if drafter is None:
        return
    spec, drafter_contract = drafter
    contract = prepare_contract(drafter_contract, spec)
    is_autoregressive = spec.family == AUTOREGRESSIVE
    prepare = PrepareRootGraph(contract, length) if is_autoregressive else PrepareGraph(spec, length)
    yield "prepare", _traced(prepare, contract)
    contract = commit_contract(backbone, model, length)
    commit = StepGraph(
        trace_standard(CommitGraph(), contract), contract, StepCheck(CommitGraph(scattered), contract)
    )
    yield "commit", commit


def _searches(
    drafter: DrafterSpec, drafter_contract: GraphSpec, sizes: tuple[int, ...]
) -> Iterator[tuple[str, StepGraph]]:
    contracts = {nodes: search_contract(drafter_contract, drafter, nodes) for nodes in sizes}
    if not contracts:
        return
    if drafter.family == AUTOREGRESSIVE:
        if num_levels(drafter, sizes[-1]) > 1:
            yield "expand", _traced(ExpandGraph(drafter), expand_contract(drafter_contract, drafter))
        for nodes, contract in contracts.items():
            yield f"search_{nodes}", _traced(LevelSearchGraph(nodes), contract)
        return
    makes = SearchGraphs(contracts[sizes[0]], merges_repeats=drafter.merges_repeats)
    for nodes, contract in contracts.items():
        module = SearchGraph(nodes, merges_repeats=drafter.merges_repeats)
        graph = StepGraph(makes.graph(contract, nodes), contract, StepCheck(module, contract))
        yield f"search_{nodes}", graph


def check_step_nodes(
    step_nodes: tuple[int, ...], config: DrafterConfig | None, options: Options, most: int
) -> tuple[int, ...]:
    """The sizes in ascending order, 0 among them, since every device that drafts can also decode plainly.

    most: nodes that engines take at most
    Raises ExportError for a size that is out of range, or that the head has no search for.
    """
    for size in sorted({*step_nodes} - {0}):
        if config is None:
            raise ExportError(f"--step-nodes: a bundle without a draft head has steps of 0 nodes, got {size}")
        if options.family_of(config) == STREAMING:
            raise ExportError(
                "--step-nodes: streams of the verify pass run in steps on the host, a device has steps of 0 "
                f"nodes, got {size}; --stream-pass own makes steps for devices"
            )
        if not 0 < size <= most:
            raise ExportError(
                f"--step-nodes: must be between 0 and {most}, the largest tree of these engines, got {size}"
            )
        elements = search_elements(config, options, size)
        if elements > MAX_TOP_K_ELEMENTS:
            raise ExportError(
                f"--step-nodes: a search for {size} nodes chooses among {elements} prefixes, of which a "
                f"device takes {MAX_TOP_K_ELEMENTS}; use a smaller size or a smaller --top-k"
            )
    return tuple(sorted({0, *step_nodes})) if step_nodes else ()


def search_elements(config: DrafterConfig, options: Options, num_nodes: int) -> int:
    """Among how many a search chooses for so many drafts: prefixes of a frame, or children of all passes."""
    if config.family != AUTOREGRESSIVE:
        return kept_prefixes(num_nodes) * (frame_top_k(config, options.top_k) + 1)
    passes_below = min(num_nodes, config.num_frames) - 1
    return max(num_nodes, options.top_k * (1 + options.beam_width * passes_below))


def _traced(module: nn.Module, contract: GraphSpec) -> StepGraph:
    return StepGraph(trace_standard(module, contract), contract, StepCheck(module, contract))
