"""What an export target needs to build a draft head of any type."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.head_types import AUTOREGRESSIVE, PARALLEL
from drafters.lattice import frame_top_k
from drafters.parallel import ParallelDrafter
from drafters.streaming import StreamFrames
from export.errors import ExportError
from export.graphs.contracts import autoregressive_contract, parallel_contract, streaming_contract
from export.graphs.modules import AutoregressiveGraph, ParallelGraph
from export.graphs.stream_head import StreamHeadGraph
from export.graphs.streaming import StreamingGraph
from export.options import STREAM_PASSES, VERIFY_PASS, Options
from export.verify.autoregressive import autoregressive_reference, check_autoregressive
from export.verify.graph_runner import GraphRunner
from export.verify.parallel import check_parallel, parallel_reference
from export.verify.streaming import DRAFT_SLACK, check_streaming, streaming_reference
from runtime.core.bundle import MAX_NUM_NODES, STREAMING, DrafterSpec, GraphSpec, ModelSpec

# Compares a built graph with PyTorch: the largest differences by name.
Check = Callable[[GraphRunner], dict[str, float]]
# The largest --beam-width: nodes of a level that one pass may expand.
MAX_BEAM_WIDTH = 256


@dataclass(frozen=True)
class PreparedDrafter:
    """A head, its contract, and the module to trace.

    check: takes a context [P, F*H] and computes what the head, as it is then, makes of it; returns what
        compares a built graph with that
    """

    spec: DrafterSpec
    contract: GraphSpec
    module: nn.Module
    check: Callable[[NDArray[np.float32]], Check]


def prepare_drafter(drafter: Drafter, options: Options, model: ModelSpec | None = None) -> PreparedDrafter:
    """Raises ExportError for options that do not fit the head.

    model: the target model, which a graph with streams has a part of
    """
    family = options.family_of(drafter.config)
    if options.stream_pass not in STREAM_PASSES:
        raise ExportError(
            f"--stream-pass: must be one of {', '.join(STREAM_PASSES)}, got {options.stream_pass!r}"
        )
    for flag, is_set, is_free, owner in (
        ("--stream-pass", options.stream_pass != VERIFY_PASS, isinstance(drafter, StreamFrames), "streams"),
        ("--kept-nodes", options.kept_nodes is not None, family == STREAMING, "streams in the verify pass"),
    ):
        if is_set and not is_free:
            raise ExportError(f"{flag}: is for {owner} only, got {_described(drafter.config, options)}")
    if isinstance(drafter, StreamFrames):
        assert model is not None
        if options.head_precision != options.precision:
            raise ExportError(
                f"--drafter-precision: streams run through the target model's layers, which have the "
                f"precision {options.precision}, got {options.head_precision}"
            )
        prepare = _prepare_streaming if family == STREAMING else _prepare_stream_head
        return prepare(drafter, options, model)
    return PREPARE[family](drafter, options)


def _described(config: DrafterConfig, options: Options) -> str:
    if config.trunk_type.borrows_layers:
        return f"a head of streams with --stream-pass {options.stream_pass}"
    return f"a {config.drafter_type} head"


def _prepare_parallel(drafter: ParallelDrafter, options: Options) -> PreparedDrafter:
    spec = _parallel_spec(drafter.config, options)
    return _prepared(drafter, spec, ParallelGraph(drafter, spec.top_k, options.attention))


def _prepare_stream_head(drafter: StreamFrames, options: Options, model: ModelSpec) -> PreparedDrafter:
    """Streams in a pass of their own, which is that of a parallel drafter with the model's own layers."""
    spec = dataclasses.replace(
        _parallel_spec(drafter.config, options), num_kv_heads=model.num_kv_heads, head_dim=model.head_dim
    )
    module = StreamHeadGraph(drafter, model.max_position_embeddings, spec.top_k, options.attention)
    return _prepared(drafter, spec, module, slack=DRAFT_SLACK)


def _prepared(
    drafter: ParallelDrafter, spec: DrafterSpec, module: nn.Module, *, slack: float = 1.0
) -> PreparedDrafter:
    def check(features: NDArray[np.float32]) -> Check:
        reference = parallel_reference(drafter, features, width=spec.top_k)
        return lambda graph: check_parallel(graph, reference, slack=slack)

    return PreparedDrafter(spec, parallel_contract(drafter.config, spec), module, check)


def _prepare_streaming(drafter: StreamFrames, options: Options, model: ModelSpec) -> PreparedDrafter:
    config, kept = drafter.config, options.kept_nodes
    if kept is not None and not 1 <= kept <= MAX_NUM_NODES:
        raise ExportError(f"--kept-nodes: must be between 1 and {MAX_NUM_NODES}, got {kept}")
    spec = dataclasses.replace(_parallel_spec(config, options), kept_nodes=kept)
    contract = streaming_contract(model, config, spec)
    module = StreamingGraph(drafter, model.max_position_embeddings, spec.top_k, options.attention)

    def check(features: NDArray[np.float32]) -> Check:
        reference = streaming_reference(drafter, width=spec.top_k)
        return lambda graph: check_streaming(graph, reference)

    return PreparedDrafter(spec, contract, module, check)


def _parallel_spec(config: DrafterConfig, options: Options) -> DrafterSpec:
    width = frame_top_k(config, options.top_k)
    if not 1 <= width <= config.vocab_size:
        raise ExportError(f"--top-k: must be between 1 and {config.vocab_size} for this head, got {width}")
    return dataclasses.replace(_spec(config, options), top_k=width)


def _prepare_autoregressive(drafter: AutoregressiveDrafter, options: Options) -> PreparedDrafter:
    config = drafter.config
    for flag, width, most in (
        ("--top-k", options.top_k, config.vocab_size),
        ("--beam-width", options.beam_width, MAX_BEAM_WIDTH),
    ):
        if not 1 <= width <= most:
            raise ExportError(f"{flag}: must be between 1 and {most} for this head, got {width}")
    if not 0 <= options.min_level_probability < 1:
        raise ExportError(
            f"--min-level-probability: must be at least 0 and below 1, got {options.min_level_probability}"
        )
    spec = dataclasses.replace(
        _spec(config, options),
        beam_width=options.beam_width,
        min_level_probability=options.min_level_probability,
        heads_per_depth=drafter.heads_per_depth,
    )
    contract = autoregressive_contract(drafter, spec)
    module = AutoregressiveGraph(drafter, options.top_k, options.attention)

    def check(features: NDArray[np.float32]) -> Check:
        reference = autoregressive_reference(drafter, features)
        return lambda graph: check_autoregressive(graph, reference)

    return PreparedDrafter(spec, contract, module, check)


def _spec(config: DrafterConfig, options: Options) -> DrafterSpec:
    return DrafterSpec(
        drafter_type=config.drafter_type,
        family=options.family_of(config),
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


PREPARE: dict[str, Callable[..., PreparedDrafter]] = {
    PARALLEL: _prepare_parallel,
    AUTOREGRESSIVE: _prepare_autoregressive,
}
