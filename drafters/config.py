"""The configuration of a draft head: what its ``config.json`` holds."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME = "config.json"
DRAFTER_TYPES = ("ctc", "block", "medusa", "hydra", "eagle")
TRUNKS = ("attention", "residual")
TRANSITIONS = ("none", "markov", "mlp")
FRAME_STARTS = ("anchor", "fused")


class DrafterConfigError(ValueError):
    """A drafter configuration that cannot be used; the message names the field."""


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes of a draft head and of the backbone it was made for.

    The head works at the backbone's width, because it shares the backbone's embedding and LM head.
    ``target_layer_ids`` are decoder layers counted from 0; a feature is the residual stream after
    that layer (before any final norm).

    drafter_type: ``ctc``, ``block`` (the same without a blank), ``medusa``, ``hydra`` or ``eagle``
    trunk: what fills the frames of a ``ctc`` head: ``attention``, or ``residual`` as Medusa's heads
    num_frames: frames T drafted at once; for ``hydra`` and ``eagle``, the depth they draft to
    num_layers: attention layers (0: the head looks at the last context token only; ``eagle`` has 1,
        ``hydra`` 0, or 1 for the prefix attention of Hydra++)
    frame_start: what an attention trunk's frames begin as: ``anchor``, learned queries of which the
        first carries the anchor token, or ``fused``, all of them made from the anchor token and the
        last context token
    start_size: inner width of what makes fused starts; None for ``hidden_size``
    head_depth: layers of a residual or Hydra head's MLP
    own_lm_head: every frame has an LM head of its own, trained, as published for Medusa
    transition: how a frame depends on the label before it: ``none``, ``markov`` or ``mlp``
    transition_size: rank of the transition
    num_candidates: labels of a frame that the transition may move
    calibration: (a, b) of psi' = sigmoid(a logit(psi) + b), where measured
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
    trunk: str = "attention"
    frame_start: str = "anchor"
    start_size: int | None = None
    head_depth: int = 1
    own_lm_head: bool = False
    transition: str = "none"
    transition_size: int = 128
    num_candidates: int = 32
    calibration: tuple[float, float] | None = None
    base_model: str = ""
    base_model_revision: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if self.calibration is not None:
            pair = tuple(self.calibration)
            object.__setattr__(self, "calibration", pair)
            if len(pair) != 2 or not all(map(math.isfinite, pair)) or pair[0] <= 0:
                raise DrafterConfigError(
                    f"calibration must be two finite numbers, the first above 0, got {list(pair)}"
                )
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "num_frames",
            "head_depth",
            "transition_size",
            "num_candidates",
        ):
            if getattr(self, name) < 1:
                raise DrafterConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, known in (
            ("drafter_type", DRAFTER_TYPES),
            ("trunk", TRUNKS),
            ("transition", TRANSITIONS),
            ("frame_start", FRAME_STARTS),
        ):
            if getattr(self, name) not in known:
                raise DrafterConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.start_size is not None and self.start_size < 1:
            raise DrafterConfigError(f"start_size must be at least 1, got {self.start_size}")
        self._check_combination()
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

    def _check_combination(self) -> None:
        """Refuse settings that contradict each other."""
        least, most = self._layer_range()
        if not least <= self.num_layers <= most:
            bound = f"at least {least}" if self.num_layers < least else f"at most {most}"
            raise DrafterConfigError(f"num_layers must be {bound}, got {self.num_layers}")
        if self.drafter_type in ("hydra", "eagle") and self.trunk != "attention":
            raise DrafterConfigError(f"trunk must be 'attention' for {self.drafter_type}, got {self.trunk!r}")
        if self.trunk == "residual" and self.num_layers:
            raise DrafterConfigError(f"num_layers must be 0 for a residual trunk, got {self.num_layers}")
        if self.drafter_type == "medusa" and self.trunk != "residual":
            raise DrafterConfigError("trunk must be 'residual' for medusa, got 'attention'")
        if self.frame_start != "anchor" and (
            self.drafter_type not in ("ctc", "block") or self.trunk != "attention"
        ):
            raise DrafterConfigError(
                f"frame_start must be 'anchor' for {self.drafter_type} with trunk {self.trunk!r}, "
                f"got {self.frame_start!r}"
            )
        if self.transition != "none" and self.drafter_type not in ("ctc", "block"):
            raise DrafterConfigError(
                f"transition must be 'none' for {self.drafter_type}, got {self.transition!r}"
            )
        if self.transition != "none" and self.num_candidates > self.vocab_size:
            raise DrafterConfigError(
                f"num_candidates must be at most vocab_size {self.vocab_size}, got {self.num_candidates}"
            )
        if self.own_lm_head and self.trunk != "residual":
            raise DrafterConfigError("own_lm_head must be false for an attention trunk, got true")

    def _layer_range(self) -> tuple[int, float]:
        """How few and how many attention layers a head of this kind may have."""
        if self.drafter_type == "eagle":
            return 1, 1
        if self.drafter_type == "hydra":
            return 0, 1
        needed = self.drafter_type in ("ctc", "block") and self.trunk == "attention"
        return int(needed), math.inf

    @property
    def has_blank(self) -> bool:
        """Whether a frame may say nothing."""
        return self.drafter_type == "ctc"

    @property
    def reads_anchor(self) -> bool:
        """Whether the anchor token has a say in a frame head's drafts."""
        return self.trunk == "attention" or self.transition != "none"

    @property
    def merges_repeats(self) -> bool:
        """Whether a label repeated in the next frame is the same one (CTC), or a second one.

        With a transition model every emission is conditioned on the one before it, so that each
        frame emits a blank or one label and nothing merges; without blanks nothing may merge.
        """
        return self.has_blank and self.transition == "none"

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
