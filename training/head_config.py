"""The settings with which a draft head is trained, their presets, and the TOML file that lists several heads.

A preset (``--preset``) is a named set of settings: our own recommendation, or what a paper publishes. Flags
beside ``--preset`` replace single settings of it. Without the flag, a ``ctc`` head starts from the
recommended settings, as far as its trunk supports them, and every other type from its own defaults. A head in
a TOML file has the settings that the file states, and the defaults of ``HeadConfig`` for the others.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from drafters.config import HeadSettings, setting
from drafters.head_types import HEAD_TYPES
from training.settings import LARGEST_SEED, TrainingError, flag

# The names of ``LOSSES`` in ``training.head_set``, which imports torch and so cannot be imported here.
LOSS_NAMES = ("prefix", "ctc", "ce", "streams")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(HeadSettings):
    """A head and how it is trained. ``name`` is its directory below OUT; empty means OUT itself."""

    name: str = ""
    loss: str = setting(
        None,
        "loss (default: prefix for ctc, streams for streaming, ce for the others)",
        choices=LOSS_NAMES,
    )
    num_labels: int = setting(
        None, "labels U after an anchor that the loss looks at (default: T, for ctc T - 2)", minimum=1
    )
    soft_labels: float = setting(
        0.0, "share of the target model's own distribution in the targets, 0 to 1", minimum=0, maximum=1
    )
    learning_rate: float = setting(
        None,
        "peak, reached after the warm-up (default: 0.001, for streams 0.01)",
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    init_from: Path | None = setting(None, "draft head to start from: what fits is taken, whatever its type")
    seed: int = setting(0, "of the head's first weights", minimum=0, maximum=LARGEST_SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        has_blank = self.head_type.has_blank
        if self.loss is None:
            frames = "streams" if self.trunk_type.borrows_layers else "ce"
            object.__setattr__(self, "loss", "prefix" if has_blank else frames)
        if self.learning_rate is None:
            # LoRA adapters start at zero, and at the other heads' rate they hardly leave it.
            object.__setattr__(self, "learning_rate", 1e-2 if self.trunk_type.borrows_layers else 1e-3)
        if self.num_labels is None:
            # A frame without a blank is one label. A CTC head has two frames more than labels, for blanks.
            object.__setattr__(self, "num_labels", max(1, self.num_frames - (2 if has_blank else 0)))
        losses = ("ce", "streams") if self.trunk_type.borrows_layers else ("ce",)
        if self.loss not in losses and not has_blank:
            known = " or ".join(losses)
            problem = f"{self.drafter_type} heads have no blank, so it must be {known}; got {self.loss!r}"
            raise self.refusal("loss", problem)
        if has_blank and self.num_labels > self.num_frames:
            raise self.refusal(
                "num_labels",
                f"a frame has one label at most, so it must be at most num_frames {self.num_frames}, got "
                f"{self.num_labels}",
            )
        if not has_blank and self.num_labels < self.num_frames:
            raise self.refusal(
                "num_labels",
                "without a blank every frame is a label, so it must be at least num_frames "
                f"{self.num_frames}, got {self.num_labels}",
            )

    def refusal(self, name: str, problem: str) -> TrainingError:
        """The error for a setting of this head; it names the head, if it has a name, and the setting."""
        where = f"head {self.name!r}: {flag(name)[2:]}" if self.name else flag(name)
        return TrainingError(f"{where}: {problem}")

    def published(self) -> dict[str, Any]:
        """The settings for ``training.json``. Paths are given by name only, so it can be published."""
        values = dataclasses.asdict(self)
        values["init_from"] = self.init_from.name if self.init_from else None
        return values


def read_heads(path: Path) -> tuple[HeadConfig, ...]:
    """Read a TOML file with one ``[[head]]`` table a head. Raises TrainingError naming head and field."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"--heads: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"--heads: {path} is not valid TOML: {error}") from error
    tables = values.get("head")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise TrainingError(f"--heads: {path}: expected at least one [[head]] table")
    heads = tuple(_head(f"--heads: {path}: head {number}", table) for number, table in enumerate(tables, 1))
    names = [head.name for head in heads]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise TrainingError(f"--heads: {path}: the name {doubled!r} is given to two heads")
    return heads


def _head(where: str, table: dict[str, Any]) -> HeadConfig:
    kinds = {field.name: field.type for field in dataclasses.fields(HeadConfig)}
    name = table.get("name")
    if not isinstance(name, str) or not name or "/" in name or name in (".", ".."):
        raise TrainingError(f"{where}: field 'name': expected the name of a directory, got {name!r}")
    values = {}
    for field, value in table.items():
        if field not in kinds:
            raise TrainingError(f"{where}: unknown field {field!r}")
        kind: Any = kinds[field]
        try:
            # The hook makes what msgspec does not know: paths.
            values[field] = msgspec.convert(value, kind, dec_hook=lambda made, given: made(given))
        except msgspec.ValidationError as error:
            expected = kind.__name__ if isinstance(kind, type) else str(kind).replace(" | None", "")
            message = f"{where}: field {field!r}: expected {expected}, got {value!r}"
            raise TrainingError(message) from error
    return HeadConfig(**values)


# What the presets of block heads share.
BLOCK = {"drafter_type": "block", "num_frames": 8, "soft_labels": 0.5}
RECOMMENDED = "ctc"
# Labels are as many as the number of frames gives, see ``HeadConfig``.
PRESETS: dict[str, dict[str, Any]] = {
    # The best of the tables in docs/methods.md: frames that start from anchor and context, an MLP transition,
    # two spare frames, and the target model's own distribution as half of the targets.
    "ctc": {
        "drafter_type": "ctc",
        "frame_start": "fused",
        "num_frames": 12,
        "transition": "mlp",
        "soft_labels": 0.5,
    },
    # CTC-drafter as published (arXiv 2412.00061): CTC loss and independent frames.
    "paper": {"drafter_type": "ctc", "loss": "ctc", "num_frames": 8},
    # arXiv 2401.10774: four heads with LM heads of their own.
    "medusa": {"drafter_type": "medusa", "num_frames": 4, "own_lm_head": True},
    # arXiv 2402.05109, and Hydra++ of the same paper.
    "hydra": {"drafter_type": "hydra", "num_frames": 4},
    "hydra-pp": {
        "drafter_type": "hydra",
        "num_frames": 4,
        "num_layers": 1,
        "head_depth": 4,
        "soft_labels": 1.0,
    },
    # EAGLE-3 style, arXiv 2503.01840.
    "eagle": {"drafter_type": "eagle", "num_frames": 7, "soft_labels": 1.0},
    # DFlash style, arXiv 2602.06036; DSpark style, 2607.05147; TreeFlash style, 2606.03819.
    "block": BLOCK,
    "block-markov": BLOCK | {"transition": "markov"},
    # Exactly DSpark's form, which other engines load without a plug-in.
    "dspark": BLOCK | {"trunk": "dspark", "transition": "markov"},
    # Exactly DFlash's form: the first frame is the anchor's, and says nothing.
    "dflash": BLOCK | {"trunk": "dflash", "num_frames": 9},
    "block-mlp": BLOCK | {"transition": "mlp"},
}


def preset_settings(preset: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a head that flags describe: those of a preset and what was ``given``."""
    if preset is not None:
        return PRESETS[preset] | given
    if given.get("drafter_type", RECOMMENDED) != RECOMMENDED:
        return given
    trunk = HEAD_TYPES[RECOMMENDED].trunks.get(given.get("trunk", ""))
    if trunk is not None and trunk.borrows_layers:
        # Streams have settings of their own. Examples are in demo/streams.toml.
        return given
    settings = PRESETS[RECOMMENDED]
    if trunk is not None and not trunk.fused_start:
        settings = {name: value for name, value in settings.items() if name != "frame_start"}
    return settings | given
