"""The settings of one draft head, and the TOML file that lists several."""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.config import DRAFTER_TYPES, FRAME_STARTS, TRANSITIONS, TRUNKS
from training.errors import TrainingError
from training.losses import LOSSES


@dataclass(frozen=True)
class HeadConfig:
    """What is trained. ``name`` is its directory below OUT; empty for OUT itself."""

    name: str = ""
    drafter_type: str = "ctc"
    loss: str = ""
    trunk: str = ""
    frame_start: str = "anchor"
    start_size: int | None = None
    num_frames: int = 8
    num_labels: int | None = None
    num_layers: int | None = None
    head_depth: int = 1
    intermediate_size: int | None = None
    own_lm_head: bool = False
    transition: str = "none"
    transition_size: int = 128
    num_candidates: int = 32
    soft_labels: float = 0.0
    learning_rate: float = 1e-3
    init_from: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        where = f"head {self.name!r}: " if self.name else "--"
        for field, known in (
            ("drafter_type", DRAFTER_TYPES),
            ("transition", TRANSITIONS),
            ("frame_start", FRAME_STARTS),
        ):
            if getattr(self, field) not in known:
                raise TrainingError(
                    f"{where}{_flag(field)}: must be one of {', '.join(known)}, got {getattr(self, field)!r}"
                )
        if not self.loss:
            object.__setattr__(self, "loss", "prefix" if self.drafter_type == "ctc" else "ce")
        if not self.trunk:
            object.__setattr__(self, "trunk", "residual" if self.drafter_type == "medusa" else "attention")
        if self.num_layers is None:
            none = self.trunk == "residual" or self.drafter_type == "hydra"
            object.__setattr__(self, "num_layers", 0 if none else 1)
        if self.num_labels is None:
            # A frame without a blank is one label; a blank lets a CTC head spare two.
            spare = 2 if self.drafter_type == "ctc" else 0
            object.__setattr__(self, "num_labels", max(1, self.num_frames - spare))
        if self.loss not in LOSSES:
            raise TrainingError(f"{where}loss: must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.loss != "ce" and self.drafter_type != "ctc":
            raise TrainingError(
                f"{where}loss: a {self.drafter_type} head has no blank, so it must be ce; got {self.loss!r}"
            )
        if self.trunk not in TRUNKS:
            raise TrainingError(f"{where}trunk: must be one of {', '.join(TRUNKS)}, got {self.trunk!r}")
        for field in ("num_frames", "num_labels", "head_depth", "transition_size", "num_candidates"):
            if getattr(self, field) < 1:
                raise TrainingError(f"{where}{_flag(field)}: must be at least 1, got {getattr(self, field)}")
        assert self.num_labels is not None
        if self.drafter_type != "ctc" and self.num_labels < self.num_frames:
            raise TrainingError(
                f"{where}{_flag('num_labels')}: without a blank every frame is a label, so it must be "
                f"at least num_frames {self.num_frames}, got {self.num_labels}"
            )
        if not 0 <= self.soft_labels <= 1:
            raise TrainingError(
                f"{where}{_flag('soft_labels')}: must be between 0 and 1, got {self.soft_labels}"
            )
        if not 0 < self.learning_rate < 1:
            raise TrainingError(
                f"{where}{_flag('learning_rate')}: must be between 0 and 1, got {self.learning_rate}"
            )

    def published(self) -> dict[str, Any]:
        """The settings for ``training.json``; paths only by name."""
        values = dataclasses.asdict(self)
        values["init_from"] = self.init_from.name if self.init_from else None
        return values


HEAD_HELP = {
    "drafter_type": f"one of {', '.join(DRAFTER_TYPES)}",
    "loss": f"one of {', '.join(LOSSES)} (default: prefix for ctc, ce for the others)",
    "trunk": f"one of {', '.join(TRUNKS)} (default: residual for medusa, else attention)",
    "frame_start": f"one of {', '.join(FRAME_STARTS)}: what a ctc or block head's frames are made from",
    "start_size": "inner width of what makes fused starts (default: the model's)",
    "num_frames": "frames T of the head; for hydra and eagle, how deep they draft",
    "num_labels": "labels U after an anchor that the loss looks at (default: T, for ctc T - 2)",
    "num_layers": "attention layers of the head (default 1; 0 for medusa and hydra)",
    "head_depth": "layers of a medusa or hydra head's MLP",
    "intermediate_size": "width of the head's MLP (default: the model's)",
    "own_lm_head": "medusa: every head trains an LM head of its own, as published",
    "transition": f"one of {', '.join(TRANSITIONS)}: how a frame depends on the label before it",
    "transition_size": "rank of the transition",
    "num_candidates": "labels of a frame that the transition may move",
    "soft_labels": "share of the backbone's own distribution in the targets, 0 to 1",
    "learning_rate": "peak, reached after the warm-up",
    "init_from": "draft head to start from: what fits is taken, whatever its type",
    "seed": "of the head's first weights",
}


def read_heads(path: Path) -> tuple[HeadConfig, ...]:
    """A TOML file with one ``[[head]]`` table a head. Raises TrainingError naming head and field."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"--heads: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"--heads: {path} is not valid TOML: {error}") from error
    tables = values.get("head")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise TrainingError(f"--heads: {path}: expected at least one [[head]] table")
    heads = tuple(_head(path, number, table) for number, table in enumerate(tables, 1))
    names = [head.name for head in heads]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise TrainingError(f"--heads: {path}: the name {doubled!r} is given to two heads")
    return heads


def _head(path: Path, number: int, table: dict[str, Any]) -> HeadConfig:
    kinds = {field.name: field.type for field in dataclasses.fields(HeadConfig)}
    where = f"--heads: {path}: head {number}"
    name = table.get("name")
    if (
        not isinstance(name, str)
        or not name
        or "/" in name
        or name in (".", "..", "cache", "checkpoint", "logs")
    ):
        raise TrainingError(f"{where}: field 'name': expected the name of a directory, got {name!r}")
    for field, value in table.items():
        if field not in kinds:
            raise TrainingError(f"{where}: unknown field {field!r}")
        expected = str(kinds[field])
        fits = (
            (isinstance(value, bool) and "bool" in expected)
            or (isinstance(value, int) and not isinstance(value, bool) and "int" in expected)
            or (isinstance(value, int | float) and not isinstance(value, bool) and "float" in expected)
            or (isinstance(value, str) and ("str" in expected or "Path" in expected))
        )
        if not fits:
            raise TrainingError(f"{where}: field {field!r}: expected {_kind(kinds[field])}, got {value!r}")
    if "init_from" in table:
        table = {**table, "init_from": Path(table["init_from"])}
    return HeadConfig(**table)


def _kind(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "")


def _flag(field: str) -> str:
    return field.replace("_", "-")
