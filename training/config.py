"""The settings of a training run, and the command line that fills them."""

import argparse
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from training.errors import TrainingError
from training.head_config import HEAD_HELP, HeadConfig, read_heads

SAVE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True)
class TrainingConfig:
    """Every flag of ``python -m training.train`` but the head's own (``HeadConfig``)."""

    model: Path
    data: tuple[Path, ...]
    out: Path
    heads: tuple[HeadConfig, ...] = (HeadConfig(),)
    target_layer_ids: tuple[int, ...] | None = None
    labels: str = "distill"
    max_new_tokens: int = 128
    max_samples: int | None = None
    max_length: int = 1024
    distill_batch_size: int = 64
    holdout: float = 0.02
    steps: int = 2000
    batch_size: int = 16
    num_anchors: int = 48
    grad_accumulation: int = 1
    optimizer: str = "muon"
    warmup: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: str = "bf16"
    save_precision: str = "fp32"
    eval_every: int = 200
    save_every: int = 200
    cache_features: bool = False
    resume: bool = False
    data_seed: int = 0
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        choices = (
            ("labels", ("distill", "data")),
            ("optimizer", ("adamw", "muon")),
            ("precision", ("bf16", "fp32")),
            ("save_precision", tuple(SAVE_DTYPES)),
        )
        for name, known in choices:
            if getattr(self, name) not in known:
                raise TrainingError(
                    f"{_flag(name)}: must be {' or '.join(known)}, got {getattr(self, name)!r}"
                )
        if not 0 < self.holdout < 1:
            raise TrainingError(f"--holdout: must be between 0 and 1, got {self.holdout}")
        positive = (
            "max_new_tokens max_length steps batch_size num_anchors grad_accumulation eval_every save_every "
            "distill_batch_size"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                raise TrainingError(f"{_flag(name)}: must be at least 1, got {getattr(self, name)}")

    def directory(self, head: HeadConfig) -> Path:
        """Where a head is written."""
        return self.out / head.name


HELP = {
    "model": "Hugging Face model directory",
    "data": "jsonl files of conversations, messages, prompts, questions or text",
    "out": "directory of the draft head, or of the heads",
    "target_layer_ids": "decoder layers the heads read (default: early, middle, last)",
    "labels": "distill: the model's own continuations; data: the data's",
    "max_new_tokens": "length of a distilled continuation",
    "max_samples": "use at most this many prompts",
    "max_length": "cut sequences to this many tokens",
    "distill_batch_size": "prompts a batch while distilling",
    "holdout": "share of the sequences kept for the acceptance estimate",
    "steps": "optimizer steps",
    "batch_size": "sequences a device and micro step",
    "num_anchors": "anchors a sequence",
    "grad_accumulation": "micro steps an optimizer step",
    "optimizer": "muon (matrices; AdamW for the rest) or adamw",
    "warmup": "steps of linear warm-up, then cosine to zero",
    "weight_decay": "decoupled",
    "max_grad_norm": "gradient clipping, head by head",
    "precision": "bf16 (autocast) or fp32",
    "save_precision": "of the finished heads' weights on disk: fp32, fp16 or int8",
    "eval_every": "steps between acceptance estimates",
    "save_every": "steps between checkpoints",
    "cache_features": "keep the backbone's hidden states of all data in the cache (2 bytes each)",
    "resume": "continue from the checkpoint in OUT",
    "data_seed": "of the data's order, the anchors and the hold-out",
    "cache_dir": "where distilled text is kept (default OUT/cache)",
}


def parse_config(argv: list[str] | None, description: str) -> TrainingConfig:
    """Flags to a configuration; one flag a field. ``--heads`` replaces the flags of a single head."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(TrainingConfig):
        if field.name != "heads":
            _add(parser, field, HELP[field.name])
    group = parser.add_argument_group("the head")
    group.add_argument(
        "--heads", type=Path, help="TOML file with a [[head]] table each: train several at once"
    )
    for field in fields(HeadConfig):
        if field.name != "name":
            _add(group, field, HEAD_HELP[field.name], default=None)
    values = vars(parser.parse_args(argv))
    file = values.pop("heads")
    own = {f.name: values.pop(f.name) for f in fields(HeadConfig) if f.name != "name"}
    given = {name: value for name, value in own.items() if value is not None}
    if file is not None and given:
        raise TrainingError(f"{_flag(next(iter(given)))}: belongs into {file}, because --heads is given")
    values["heads"] = (HeadConfig(**given),) if file is None else read_heads(file)
    values["data"] = tuple(values["data"])
    if values["target_layer_ids"] is not None:
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
    return TrainingConfig(**values)


def _add(parser: Any, field: "Field[Any]", text: str, **changed: Any) -> None:
    """A flag for a field, by the field's type."""
    kind = str(field.type)
    default = changed.get("default", field.default)
    if "bool" in kind:
        parser.add_argument(_flag(field.name), action="store_true", default=default, help=text)
        return
    of = next(t for n, t in (("Path", Path), ("int", int), ("float", float), ("str", str)) if n in kind)
    shown = "" if field.default in (None, "", MISSING) or "default" in text else f" (default {field.default})"
    options: dict[str, Any] = {"nargs": "+"} if "tuple" in kind else {}
    if default is MISSING:
        options["required"] = True
    else:
        options["default"] = default
    parser.add_argument(_flag(field.name), type=of, help=text + shown, **options)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
