"""The settings of a training run, and the command line that fills them."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from training.errors import TrainingError
from training.losses import LOSSES


@dataclass(frozen=True)
class TrainingConfig:
    """Every flag of ``python -m training.train``."""

    model: Path
    data: tuple[Path, ...]
    out: Path
    loss: str = "prefix"
    num_frames: int = 8
    num_labels: int = 6
    num_layers: int = 1
    intermediate_size: int | None = None
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
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    precision: str = "bf16"
    save_precision: str = "fp32"
    eval_every: int = 200
    save_every: int = 200
    cache_features: bool = False
    resume: bool = False
    seed: int = 0
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise TrainingError(f"--loss: must be one of {', '.join(LOSSES)}, got {self.loss!r}")
        if self.labels not in ("distill", "data"):
            raise TrainingError(f"--labels: must be distill or data, got {self.labels!r}")
        if self.precision not in ("bf16", "fp32"):
            raise TrainingError(f"--precision: must be bf16 or fp32, got {self.precision!r}")
        if self.save_precision not in ("fp32", "fp16"):
            raise TrainingError(f"--save-precision: must be fp32 or fp16, got {self.save_precision!r}")
        if not 0 < self.holdout < 1:
            raise TrainingError(f"--holdout: must be between 0 and 1, got {self.holdout}")
        positive = (
            "num_frames num_labels num_layers max_new_tokens max_length steps batch_size "
            "num_anchors grad_accumulation eval_every save_every distill_batch_size"
        )
        for name in positive.split():
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise TrainingError(f"--{flag}: must be at least 1, got {getattr(self, name)}")


HELP = {
    "model": "Hugging Face model directory",
    "data": "jsonl files of conversations, messages, prompts, questions or text",
    "out": "directory of the draft head",
    "loss": f"one of {', '.join(LOSSES)}",
    "num_frames": "frames T of the head",
    "num_labels": "labels U after an anchor that the loss looks at",
    "num_layers": "attention layers of the head",
    "intermediate_size": "width of the head's MLP (default: the model's)",
    "target_layer_ids": "decoder layers the head reads (default: early, middle, last)",
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
    "learning_rate": "peak of AdamW",
    "warmup": "steps of linear warm-up, then cosine to zero",
    "weight_decay": "of AdamW",
    "max_grad_norm": "gradient clipping",
    "precision": "bf16 (autocast) or fp32",
    "save_precision": "of the finished head's weights on disk: fp32 or fp16",
    "eval_every": "steps between acceptance estimates",
    "save_every": "steps between checkpoints",
    "cache_features": "keep the backbone's hidden states of all data in the cache (2 bytes each)",
    "resume": "continue from the checkpoint in OUT",
    "seed": "of weights, data order and anchors",
    "cache_dir": "where distilled text is kept (default OUT/cache)",
}


def parse_config(argv: list[str] | None, description: str) -> TrainingConfig:
    """Flags to a configuration; one flag a field."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    types = {"max_samples": int, "intermediate_size": int}
    for field in fields(TrainingConfig):
        flag = "--" + field.name.replace("_", "-")
        text = HELP[field.name]
        if field.name in ("model", "out", "cache_dir"):
            parser.add_argument(flag, type=Path, required=field.name != "cache_dir", help=text)
        elif field.name == "data":
            parser.add_argument(flag, type=Path, nargs="+", required=True, help=text)
        elif field.name == "target_layer_ids":
            parser.add_argument(flag, type=int, nargs="+", help=text)
        elif field.name in ("resume", "cache_features"):
            parser.add_argument(flag, action="store_true", help=text)
        else:
            shown = "" if field.default is None else f" (default {field.default})"
            kind = types.get(field.name, type(field.default))
            parser.add_argument(flag, type=kind, default=field.default, help=text + shown)
    values = vars(parser.parse_args(argv))
    values["data"] = tuple(values["data"])
    if values["target_layer_ids"] is not None:
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
    return TrainingConfig(**values)
