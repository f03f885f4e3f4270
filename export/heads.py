"""What a target needs to build a draft head, whatever its kind."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from drafters.base import Drafter
from drafters.chain import ChainDrafter
from drafters.config import DrafterConfig
from drafters.frames import FrameDrafter
from drafters.lattice import lattice_width
from export.chain import ChainGraph
from export.chain_reference import chain_reference, check_chain
from export.contracts import chain_contract, frame_contract
from export.errors import ExportError
from export.modules import FrameGraph
from export.options import Options
from export.reference import frame_reference
from export.validate import check_frames
from runtime.bundle import DrafterSpec, GraphSpec

# Nodes of a level that one pass may expand.
MAX_EXPAND_WIDTH = 256


@dataclass(frozen=True)
class PreparedDrafter:
    """A head behind its contract; ``check`` compares a built graph with PyTorch's answers."""

    spec: DrafterSpec
    contract: GraphSpec
    module: nn.Module
    check: Callable[[Path], dict[str, float]]


def prepare_drafter(drafter: Drafter, features: NDArray[np.float32], options: Options) -> PreparedDrafter:
    """features [P, F*H]: a context to compare on. Raises ExportError for options the head cannot have."""
    if isinstance(drafter, FrameDrafter):
        return _prepare_frames(drafter, features, options)
    if isinstance(drafter, ChainDrafter):
        return _prepare_chain(drafter, features, options)
    raise ExportError(f"--drafter: a {drafter.config.drafter_type} head cannot be exported")


def _prepare_frames(
    drafter: FrameDrafter, features: NDArray[np.float32], options: Options
) -> PreparedDrafter:
    config = drafter.config
    width = lattice_width(config, options.lattice_width)
    if not 1 <= width <= config.vocab_size:
        raise ExportError(
            f"--lattice-width: must be between 1 and {config.vocab_size} for this head, got {width}"
        )
    spec = dataclasses.replace(_spec(config, options), lattice_width=width)
    contract = frame_contract(config, spec)
    reference = frame_reference(drafter, features, width=width)
    module = FrameGraph(drafter, width, options.attention)
    return PreparedDrafter(spec, contract, module, lambda path: check_frames(path, contract, reference))


def _prepare_chain(drafter: ChainDrafter, features: NDArray[np.float32], options: Options) -> PreparedDrafter:
    config = drafter.config
    for flag, width, most in (
        ("--lattice-width", options.lattice_width, config.vocab_size),
        ("--expand-width", options.expand_width, MAX_EXPAND_WIDTH),
    ):
        if not 1 <= width <= most:
            raise ExportError(f"{flag}: must be between 1 and {most} for this head, got {width}")
    if not 0 <= options.min_reach < 1:
        raise ExportError(f"--min-reach: must be at least 0 and below 1, got {options.min_reach}")
    spec = dataclasses.replace(
        _spec(config, options), expand_width=options.expand_width, min_reach=options.min_reach
    )
    contract = chain_contract(drafter, spec)
    reference = chain_reference(drafter, features)
    module = ChainGraph(drafter, options.lattice_width, options.attention)
    return PreparedDrafter(spec, contract, module, lambda path: check_chain(path, contract, reference))


def _spec(config: DrafterConfig, options: Options) -> DrafterSpec:
    return DrafterSpec(
        drafter_type=config.drafter_type,
        num_frames=config.num_frames,
        lattice_width=options.lattice_width,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        merges_repeats=config.merges_repeats,
        calibration=config.calibration,
        precision=options.drafter_precision,
    )
