"""The configuration of a draft head: what its ``config.json`` holds."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"


class DrafterConfigError(ValueError):
    """A drafter configuration that cannot be used; the message names the field."""


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a CTC draft head and of the backbone it was made for.

    The head works at the backbone's width, because it shares the backbone's embedding and LM head.
    ``target_layer_ids`` are decoder layers counted from 0; a feature is the residual stream after
    that layer (before any final norm).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    base_num_layers: int
    num_frames: int = 8
    num_layers: int = 1
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    drafter_type: str = "ctc"
    base_model: str = ""
    base_model_revision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_frames",
            "num_layers",
        ):
            if getattr(self, name) < 1:
                raise DrafterConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise DrafterConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise DrafterConfigError(f"head_dim must be even, got {self.head_dim}")
        layers = self.target_layer_ids
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[0] <= layers[-1] < self.base_num_layers
        ):
            raise DrafterConfigError(
                "target_layer_ids must be distinct, ascending decoder layers below "
                f"{self.base_num_layers}, got {list(layers)}"
            )

    @property
    def feature_size(self) -> int:
        """Width of the backbone's ``features`` output: F * H."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        """Raises DrafterConfigError for an unknown or a missing field."""
        fields = dataclasses.fields(cls)
        unknown = sorted(set(values) - {f.name for f in fields})
        if unknown:
            raise DrafterConfigError(f"unknown field {unknown[0]!r}")
        required = [f.name for f in fields if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise DrafterConfigError(f"field {missing[0]!r} is missing")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, directory: Path) -> "DrafterConfig":
        """Read ``config.json`` of a checkpoint directory; errors name the file."""
        path = directory / CONFIG_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DrafterConfigError(
                f"{directory} is no drafter checkpoint: {CONFIG_NAME} is missing"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DrafterConfigError(f"{path} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(values)
        except (DrafterConfigError, TypeError) as error:
            raise DrafterConfigError(f"{path}: {error}") from error


def default_target_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and the last decoder layer of a backbone."""
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))
