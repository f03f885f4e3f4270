"""From a configuration to the draft head it describes."""

from pathlib import Path

from drafters.attention import AttentionFrames
from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.eagle import EagleDrafter
from drafters.hydra import HydraDrafter
from drafters.residual import ResidualFrames


def build_drafter(config: DrafterConfig) -> Drafter:
    """A fresh draft head of the configuration's type."""
    if config.drafter_type == "eagle":
        return EagleDrafter(config)
    if config.drafter_type == "hydra":
        return HydraDrafter(config)
    if config.trunk == "residual":
        return ResidualFrames(config)
    return AttentionFrames(config)


def load_drafter(directory: Path | str) -> Drafter:
    """Load a checkpoint in float32. Raises DrafterConfigError naming what is wrong with it."""
    directory = Path(directory)
    return build_drafter(DrafterConfig.load(directory)).load_weights(directory)
