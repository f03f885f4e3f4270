"""What the export makes of a draft head: one record a family.

``EXPORTS`` has a record for every family of ``drafters.head_types``: the options that its heads take, the
contract, the module and the check of their graph, and the sizes that engines are compiled for.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import nn

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.head_types import AUTOREGRESSIVE, PARALLEL, STREAMING
from drafters.parallel import ParallelDrafter
from drafters.streaming import StreamFrames
from export.errors import ExportError
from export.graphs.contracts import autoregressive_contract, parallel_contract, streaming_contract
from export.graphs.modules import AutoregressiveGraph, ParallelGraph, StreamHeadGraph, StreamingGraph
from export.options import FUSED, Options
from export.step.build import MAX_TOP_K_ELEMENTS, STEPS, DeviceDrafter
from export.verify.heads import (
    autoregressive_reference,
    check_autoregressive,
    check_parallel,
    parallel_reference,
)
from export.verify.runner import Check
from export.verify.target_model import DRAFT_SLACK, check_streaming, streaming_reference
from runtime.core.bundle import DrafterSpec, GraphSpec, ModelSpec

# Draft nodes of the steps that are exported for GPUs by default. Compiling the search of each takes seconds.
USUAL_STEPS = (4, 16, 64)
# Least, usual and largest size of an axis.
Bounds = tuple[int, int, int]


@dataclass(frozen=True)
class PreparedDrafter:
    """A head, its contract, and the module to trace.

    check: takes a context [P, F*H] and computes the reference with the head's weights at that time; returns
        the check of a built graph against this reference
    """

    spec: DrafterSpec
    contract: GraphSpec
    module: nn.Module
    check: Callable[[NDArray[np.float32]], Check]

    @property
    def on_device(self) -> DeviceDrafter | None:
        """The head as a device drafts with it; None if no device can run its steps by itself."""
        return (self.spec, self.contract) if self.spec.family in STEPS else None


@dataclass(frozen=True)
class DraftAxes:
    """Sizes of the axes that a pass of a head has beside those of the target model's pass.

    min_context: new context tokens that a pass reads at least
    step, prompt: bounds of the axes in the steps of all sequences, and while the prompt of one is read
    """

    min_context: int
    step: dict[str, Bounds]
    prompt: dict[str, Bounds]


@dataclass(frozen=True)
class FamilyExport:
    """What the export makes of the heads of a family.

    prepare: checks the options for a head, and gives its contract, its module to trace and its check
    axes: by the names of the axes of the graph's inputs; None if they are those of the target model's pass
    """

    prepare: Callable[[Any, Options, ModelSpec | None], PreparedDrafter]
    axes: Callable[[DrafterConfig, Options, Collection[str]], DraftAxes] | None


def prepare_drafter(drafter: Drafter, options: Options, model: ModelSpec | None = None) -> PreparedDrafter:
    """Raises ExportError for options that do not fit the head.

    model: the target model, which a graph with streams has a part of
    """
    options.check_head(drafter.config)
    return EXPORTS[options.family_of(drafter.config).name].prepare(drafter, options, model)


def _prepare_parallel(drafter: ParallelDrafter, options: Options, model: ModelSpec | None) -> PreparedDrafter:
    spec, attention, slack = _parallel_spec(drafter.config, options), options.head_attention, 1.0
    if isinstance(drafter, StreamFrames):
        # A pass of their own, which is that of a parallel drafter with the target model's layers.
        assert model is not None
        spec = replace(spec, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        slack = DRAFT_SLACK
        context = model.max_position_embeddings
        module: nn.Module = StreamHeadGraph(drafter, context, spec.top_k, attention)
    else:
        module = ParallelGraph(drafter, spec.top_k, attention)

    def check(features: NDArray[np.float32]) -> Check:
        reference = parallel_reference(drafter, features, width=spec.top_k)
        return lambda graph: check_parallel(graph, reference, slack=slack)

    return PreparedDrafter(spec, parallel_contract(drafter.config, spec), module, check)


def _prepare_streaming(drafter: StreamFrames, options: Options, model: ModelSpec | None) -> PreparedDrafter:
    assert model is not None
    config = drafter.config
    spec = replace(_parallel_spec(config, options), kept_nodes=options.kept_nodes)
    contract = streaming_contract(model, config, spec)
    module = StreamingGraph(drafter, model.max_position_embeddings, spec.top_k, options.attention or FUSED)

    def check(features: NDArray[np.float32]) -> Check:
        reference = streaming_reference(drafter, width=spec.top_k)
        return lambda graph: check_streaming(graph, reference)

    return PreparedDrafter(spec, contract, module, check)


def _parallel_spec(config: DrafterConfig, options: Options) -> DrafterSpec:
    return replace(_spec(config, options), top_k=config.frame_top_k(options.top_k))


def _prepare_autoregressive(
    drafter: AutoregressiveDrafter, options: Options, model: ModelSpec | None
) -> PreparedDrafter:
    config = drafter.config
    spec = replace(
        _spec(config, options),
        beam_width=options.beam_width,
        min_level_probability=options.min_level_probability,
        heads_per_depth=drafter.heads_per_depth,
    )
    contract = autoregressive_contract(drafter, spec)
    module = AutoregressiveGraph(drafter, options.top_k, options.head_attention)

    def check(features: NDArray[np.float32]) -> Check:
        reference = autoregressive_reference(drafter, features)
        return lambda graph: check_autoregressive(graph, reference)

    return PreparedDrafter(spec, contract, module, check)


def _spec(config: DrafterConfig, options: Options) -> DrafterSpec:
    return DrafterSpec(
        drafter_type=config.drafter_type,
        family=options.family_of(config).name,
        has_streams=config.trunk_type.borrows_layers,
        num_frames=config.num_frames,
        top_k=options.top_k,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        merges_repeats=config.merges_repeats,
        calibration=config.calibration,
        precision=options.head_precision,
    )


def _parallel_axes(config: DrafterConfig, options: Options, names: Collection[str]) -> DraftAxes:
    """While a prompt is read, a pass drafts a single frame, because its drafts are not used.

    With the same frames in both profiles TensorRT for RTX 1.7 cannot build a head of two layers.
    """
    return DraftAxes(1, {"T": (1, config.num_frames, config.num_frames)}, {"T": (1, 1, 1)})


def _autoregressive_axes(config: DrafterConfig, options: Options, names: Collection[str]) -> DraftAxes:
    """A pass reads context, nodes, or both."""
    width = options.beam_width
    axes: dict[str, Bounds] = {name: (0, width, width) for name in names if name[0] in "NM"}
    axes |= {"Q": (0, 1, 1), "P": (0, width, width + 1)}
    return DraftAxes(0, axes, axes)


EXPORTS = {
    PARALLEL: FamilyExport(_prepare_parallel, _parallel_axes),
    AUTOREGRESSIVE: FamilyExport(_prepare_autoregressive, _autoregressive_axes),
    STREAMING: FamilyExport(_prepare_streaming, None),
}


def step_sizes(config: DrafterConfig | None, options: Options, most: int) -> tuple[int, ...]:
    """Draft nodes of the steps that a GPU runs by itself; 0 is for plain decoding.

    most: as of ``check_step_nodes``, whose errors it raises
    """
    sizes = options.step_nodes
    if sizes is None:
        sizes = (0,)
        steps = STEPS.get(options.family_of(config).name) if config else None
        if config and steps:
            sizes += tuple(
                size
                for size in USUAL_STEPS
                if size <= most and steps.num_elements(config, options, size) <= MAX_TOP_K_ELEMENTS
            )
    return check_step_nodes(sizes, config, options, most)


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
        steps = STEPS.get(options.family_of(config).name)
        if steps is None:
            raise ExportError(
                "--step-nodes: streams of the verify pass run in steps on the host, a device has steps of 0 "
                f"nodes, got {size}; --stream-pass own makes steps for devices"
            )
        if not 0 < size <= most:
            raise ExportError(
                f"--step-nodes: must be between 0 and {most}, the largest tree of these engines, got {size}"
            )
        elements = steps.num_elements(config, options, size)
        if elements > MAX_TOP_K_ELEMENTS:
            raise ExportError(
                f"--step-nodes: a search for {size} nodes chooses among {elements} prefixes, of which a "
                f"device takes {MAX_TOP_K_ELEMENTS}; use a smaller size or a smaller --top-k"
            )
    return tuple(sorted({0, *step_nodes})) if step_nodes else ()
