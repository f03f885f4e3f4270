"""From a configuration to the draft head it describes."""

import pkgutil
from pathlib import Path

from drafters.base import Drafter
from drafters.config import DrafterConfig


def build_drafter(config: DrafterConfig) -> Drafter:
    """A fresh draft head of the configuration's type and trunk."""
    head: Drafter = pkgutil.resolve_name(config.trunk_type.module)(config)
    return head


def load_drafter(directory: Path | str) -> Drafter:
    """Load a checkpoint in float32. Raises DrafterConfigError with the reason."""
    directory = Path(directory)
    return build_drafter(DrafterConfig.load(directory)).load_weights(directory)
