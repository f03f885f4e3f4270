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
from export.checks.autoregressive import autoregressive_reference, check_autoregressive
from export.checks.graph_runner import GraphRunner
from export.checks.parallel import check_parallel, parallel_reference
from export.errors import ExportError
from export.graphs.contracts import autoregressive_contract, parallel_contract
from export.graphs.modules import AutoregressiveGraph, ParallelGraph
from export.options import Options
from runtime.bundle import DrafterSpec, GraphSpec

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


def prepare_drafter(drafter: Drafter, options: Options) -> PreparedDrafter:
    """Raises ExportError for options that do not fit the head."""
    return PREPARE[drafter.config.family](drafter, options)


def _prepare_parallel(drafter: ParallelDrafter, options: Options) -> PreparedDrafter:
    config = drafter.config
    width = frame_top_k(config, options.top_k)
    if not 1 <= width <= config.vocab_size:
        raise ExportError(f"--top-k: must be between 1 and {config.vocab_size} for this head, got {width}")
    spec = dataclasses.replace(_spec(config, options), top_k=width)
    contract = parallel_contract(config, spec)
    module = ParallelGraph(drafter, width, options.attention)

    def check(features: NDArray[np.float32]) -> Check:
        reference = parallel_reference(drafter, features, width=width)
        return lambda graph: check_parallel(graph, reference)

    return PreparedDrafter(spec, contract, module, check)


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
        family=config.family,
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
