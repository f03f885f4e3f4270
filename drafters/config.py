"""The configuration of a draft head, stored as ``config.json``, and how settings are declared.

A setting is declared once: a dataclass field carries its help text and its limits. ``check_settings``
enforces the limits; ``training.settings`` makes command line flags of the fields.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from drafters.head_types import HEAD_TYPES, TRUNKS, HeadType, Trunk

CONFIG_NAME, WEIGHTS_NAME = "config.json", "model.safetensors"
TRANSITIONS = ("none", "markov", "mlp")
FRAME_STARTS = ("anchor", "fused")
STREAM_SETTINGS = ("stream_mode", "lora_rank", "stream_start", "stream_identity", "exit_rank")


class DrafterConfigError(ValueError):
    """A drafter configuration that cannot be used; the message names the field."""


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: bool = False,
) -> Any:
    """A dataclass field with limits. A field without a ``default`` has to be given.

    help: what the setting is, for the flag's help; a setting without it has no flag
    exclusive: whether the value must differ from ``minimum`` and ``maximum``
    """
    limits = {"choices": choices, "minimum": minimum, "maximum": maximum, "exclusive": exclusive}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def check_settings(settings: Any, error: Callable[[str, str], Exception]) -> None:
    """Raise ``error(field, problem)`` for the first field outside its limits; None is never outside."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None or not field.metadata:
            continue
        expected = _violated_limit(value, **field.metadata)
        if expected:
            raise error(field.name, f"must be {expected}, got {value!r}")


def _violated_limit(
    value: Any,
    *,
    choices: Sequence[str],
    minimum: float | None,
    maximum: float | None,
    exclusive: bool,
    **_: str,
) -> str | None:
    """The limit that a value violates, in words; None where it violates none."""
    if choices:
        return None if value in choices else f"one of {', '.join(choices)}"
    if minimum is None:
        return None
    # Written so that a NaN is outside.
    fits = value > minimum if exclusive else value >= minimum
    if maximum is None:
        return None if fits else f"{'more than' if exclusive else 'at least'} {minimum}"
    if exclusive:
        return None if fits and value < maximum else f"more than {minimum} and less than {maximum}"
    return None if fits and value <= maximum else f"between {minimum} and {maximum}"


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The settings of a draft head that do not depend on the target model.

    A ``trunk`` or ``num_layers`` of None is replaced by the default of the head's type
    (``drafters.head_types``). Raises ``refusal`` for settings outside limits, or that the type cannot have.
    """

    drafter_type: str = setting("ctc", "type of the head", choices=tuple(HEAD_TYPES))
    trunk: str = setting(
        None, "what fills the frames (default: residual, streams or attention, by the type)", choices=TRUNKS
    )
    num_frames: int = setting(8, "frames T of the head; of hydra and eagle, the depth of a draft", minimum=1)
    num_layers: int = setting(
        None,
        "attention layers of the head (default 1, 0 for hydra and residual frames); of streams, the model's "
        "upper layers that they run through (default 2)",
    )
    frame_start: str = setting(
        "anchor",
        "what frames begin as: learned queries of which the first has the anchor token, or all made from it "
        "and the last context token; streams: as they are, or with the anchor fused into them at the end",
        choices=FRAME_STARTS,
    )
    start_size: int | None = setting(
        None, "inner width of what makes fused or mlp starts (default: the model's hidden size)", minimum=1
    )
    head_depth: int = setting(1, "layers of the MLP of a hydra head or of residual frames", minimum=1)
    intermediate_size: int = setting(
        None, "MLP width of an attention layer (default: the model's)", minimum=1
    )
    attention_window: int | None = setting(
        None, "positions that a frame looks back, itself among them (default: the whole context)", minimum=1
    )
    mask_token_id: int = setting(
        0, "dspark: the token whose embedding frames after the first begin as", minimum=0
    )
    own_lm_head: bool = setting(False, "residual frames: train an LM head for every frame, as Medusa does")
    draft_vocab_size: int | None = setting(
        None,
        "tokens that drafts are made of, the most frequent of the data (default: the whole vocabulary)",
        minimum=1,
    )
    transition: str = setting("none", "how a frame depends on the label before it", choices=TRANSITIONS)
    transition_size: int = setting(128, "rank of the transition", minimum=1)
    num_candidates: int = setting(32, "labels of a frame that the transition may move", minimum=1)
    stream_mode: str = setting(
        "lossless", "streams: LoRA adapts them alone, or also the model", choices=("lossless", "shared")
    )
    lora_rank: int = setting(32, "streams: rank of the LoRA adapters", minimum=1)
    stream_start: str = setting(
        "identity", "streams: what makes them of the model's hidden state", choices=("identity", "mlp")
    )
    stream_identity: str = setting(
        "embedding", "streams: what tells them apart, besides positions", choices=("embedding", "rotation")
    )
    exit_rank: int = setting(8, "streams: rank of the adapter that makes early-exit logits", minimum=1)

    def __post_init__(self) -> None:
        check_settings(self, self.refusal)
        trunks = self.head_type.trunks
        if self.trunk is None:
            object.__setattr__(self, "trunk", next(iter(trunks)))
        if self.trunk not in trunks:
            known = " or ".join(map(repr, trunks))
            raise self.refusal("trunk", f"must be {known} for {self.drafter_type}, got {self.trunk!r}")
        least, most = self.trunk_type.min_layers, self.trunk_type.max_layers
        if self.num_layers is None:
            usual = self.trunk_type.usual_layers
            object.__setattr__(self, "num_layers", least if usual is None else usual)
        owner = f"for {self.drafter_type} with trunk {self.trunk!r}"
        if self.num_layers < least:
            raise self.refusal("num_layers", f"must be at least {least} {owner}, got {self.num_layers}")
        if most is not None and self.num_layers > most:
            raise self.refusal("num_layers", f"must be at most {most} {owner}, got {self.num_layers}")
        is_free = {
            "frame_start": self.trunk_type.fused_start,
            "attention_window": self.trunk_type.may_have_window,
            "mask_token_id": self.trunk_type.has_mask_token,
            "own_lm_head": self.trunk_type.own_lm_head,
            # A pass through the model's own layers computes logits of the whole vocabulary anyway.
            "draft_vocab_size": not self.trunk_type.borrows_layers,
            "transition": self.head_type.may_have_transition and not self.trunk_type.silent_start,
        } | dict.fromkeys(STREAM_SETTINGS, self.trunk_type.borrows_layers)
        for field in dataclasses.fields(HeadSettings):
            value = getattr(self, field.name)
            if not is_free.get(field.name, True) and value != field.default:
                problem = f"must be {field.default!r} {owner}, got {value!r}; such a head has no use for it"
                raise self.refusal(field.name, problem)

    def refusal(self, name: str, problem: str) -> Exception:
        """The error of a setting that cannot be used."""
        return DrafterConfigError(f"{name} {problem}")

    @property
    def head_type(self) -> HeadType:
        return HEAD_TYPES[self.drafter_type]

    @property
    def family(self) -> str:
        """The name of the family before an export, ``parallel`` or ``autoregressive``."""
        return self.head_type.family

    @property
    def trunk_type(self) -> Trunk:
        return self.head_type.trunks[self.trunk]

    def default_target_layers(self, base_num_layers: int) -> tuple[int, ...]:
        """The layers that the head reads unless told, of a target model with this many."""
        if self.trunk_type.borrows_layers:
            # Streams begin where the layers that they run through begin.
            return (base_num_layers - self.num_layers - 1,)
        return default_target_layers(base_num_layers)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(HeadSettings):
    """The settings of a draft head and the sizes of the target model it was made for.

    The head works at the target model's width, because it shares its embedding and LM head.

    target_layer_ids: decoder layers of the target model, counted from 0; a feature is the residual
        stream after such a layer, before any final norm
    base_weights: digest of some of the target model's weights (``weights_digest``), "" if unknown
    calibration: (a, b) of acceptance probability = sigmoid(a logit(prefix probability) + b), where measured
    """

    vocab_size: int = setting(minimum=1)
    hidden_size: int = setting(minimum=1)
    intermediate_size: int = setting(minimum=1)
    num_heads: int = setting(minimum=1)
    num_kv_heads: int = setting(minimum=1)
    head_dim: int = setting(minimum=1)
    target_layer_ids: tuple[int, ...]
    base_num_layers: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    calibration: tuple[float, float] | None = None
    base_model: str = ""
    base_model_revision: str | None = None
    base_weights: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if self.label_count > self.vocab_size:
            raise DrafterConfigError(
                f"draft_vocab_size must be at most vocab_size {self.vocab_size}, got {self.draft_vocab_size}"
            )
        if self.mask_token_id >= self.vocab_size:
            raise DrafterConfigError(
                f"mask_token_id must be below vocab_size {self.vocab_size}, got {self.mask_token_id}"
            )
        if self.calibration is not None:
            pair = tuple(self.calibration)
            object.__setattr__(self, "calibration", pair)
            if len(pair) != 2 or not all(map(math.isfinite, pair)) or pair[0] <= 0:
                raise DrafterConfigError(
                    f"calibration must be two finite numbers, the first above 0, got {list(pair)}"
                )
        if self.transition != "none" and self.num_candidates > self.label_count:
            name = "vocab_size" if self.draft_vocab_size is None else "draft_vocab_size"
            raise DrafterConfigError(
                f"num_candidates must be at most {name} {self.label_count}, got {self.num_candidates}"
            )
        if self.num_heads % self.num_kv_heads:
            raise DrafterConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise DrafterConfigError(f"head_dim must be even, got {self.head_dim}")
        layers = self.target_layer_ids
        if self.trunk_type.borrows_layers:
            if self.num_layers >= self.base_num_layers:
                raise DrafterConfigError(
                    f"num_layers must be below the model's {self.base_num_layers} layers with trunk "
                    f"{self.trunk!r}, got {self.num_layers}"
                )
            expected = self.default_target_layers(self.base_num_layers)
            if layers != expected:
                raise DrafterConfigError(
                    f"target_layer_ids must be {list(expected)} for streams through the upper "
                    f"{self.num_layers} of {self.base_num_layers} layers, got {list(layers)}"
                )
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
    def has_blank(self) -> bool:
        """Whether a frame may say nothing. In DFlash's form the first one does, and no other one."""
        return self.head_type.has_blank or self.trunk_type.silent_start

    @property
    def label_count(self) -> int:
        """The number of tokens that drafts are made of."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def frame_top_k(self, width: int) -> int:
        """Labels of a frame: ``width``, but with a transition at most as many as it may move."""
        return width if self.transition == "none" else min(width, self.num_candidates)

    @property
    def reads_anchor(self) -> bool:
        """Whether a parallel head's drafts depend on the anchor token."""
        return self.trunk_type.attends or self.frame_start == "fused" or self.transition != "none"

    @property
    def merges_repeats(self) -> bool:
        """Whether a label that the next frame repeats is emitted once (CTC), not twice.

        With a transition every emission depends on the one before it, so each frame emits a blank or a
        label of its own. Without blanks nothing merges either.
        """
        return self.head_type.has_blank and self.transition == "none"

    @property
    def feature_size(self) -> int:
        """Width F * H of the features."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DrafterConfig":
        """Raises DrafterConfigError for an unknown or a missing field, and for a value of another type."""
        fields = dataclasses.fields(cls)
        unknown = sorted(set(values) - {f.name for f in fields})
        if unknown:
            raise DrafterConfigError(f"unknown field {unknown[0]!r}")
        required = [f.name for f in fields if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise DrafterConfigError(f"field {missing[0]!r} is missing")
        try:
            return msgspec.convert(values, cls)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            # What ``__post_init__`` refuses is its cause.
            raise DrafterConfigError(str(error.__cause__ or error)) from error

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
        except (ValueError, RecursionError) as error:
            raise DrafterConfigError(f"{path} is not valid JSON: {error}") from error
        if isinstance(values, dict) and "model_type" in values:
            raise DrafterConfigError(f"{directory} is a model; expected the directory of a draft head")
        try:
            return cls.from_dict(values)
        except (DrafterConfigError, TypeError) as error:
            raise DrafterConfigError(f"{path}: {error}") from error


def default_target_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and the last decoder layer of a target model."""
    return tuple(sorted({min(1, num_layers - 1), num_layers // 2, num_layers - 1}))
