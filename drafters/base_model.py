"""Whether a draft head was made for a target model."""

from typing import Any

from drafters.config import DrafterConfig, DrafterConfigError
from drafters.target_models import weights_digest


def check_base_weights(config: DrafterConfig, model: Any) -> None:
    """Raises DrafterConfigError for a target model of other weights than the head was trained for.

    model: in float32, because rounded weights have another digest. A head that records no digest passes.
    """
    if config.base_weights and config.base_weights != weights_digest(model):
        raise DrafterConfigError(
            f"base_weights must be the target model's {weights_digest(model)}, got {config.base_weights}; "
            f"the head was trained for a model of other weights{_named(config)}"
        )


def check_base_name(config: DrafterConfig, name: str) -> None:
    """Raises DrafterConfigError for a target model of another name, if only names tell.

    A head that records a digest passes: the name of a directory may change.
    """
    recorded = config.base_model.rpartition("/")[2]
    if recorded and not config.base_weights and recorded != name.rpartition("/")[2]:
        raise DrafterConfigError(
            f"base_model must be the target model's name {name!r}, got {config.base_model!r}; the head "
            "records no digest of its model's weights"
        )


def _named(config: DrafterConfig) -> str:
    return f", {config.base_model!r}" if config.base_model else ""
