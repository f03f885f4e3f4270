"""The settings of a training run, and the command line that fills them."""

from dataclasses import dataclass
from pathlib import Path

from drafters.config import setting
from runtime.core.cli import Parser, directory_name
from training.head_config import PRESETS, RECOMMENDED, HeadConfig, preset_settings, read_heads
from training.settings import (
    AUTO,
    LARGEST_SEED,
    MODEL_DTYPES,
    PromptSettings,
    TrainingError,
    add_flags,
    flag,
    flag_fields,
    parse_flags,
)

# The values of --save-precision, and the names of torch's types for them.
SAVE_DTYPES = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
# The groups of the help text, and the first setting of each.
GROUPS = {
    "model and data": "data",
    "continuations and features": "labels",
    "training": "steps",
    "what is written": "out",
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(PromptSettings):
    """Every flag of ``python -m training.train`` except those of the head (``HeadConfig``).

    base_model: the name of the target model, if it differs from the name of its directory
    """

    model: Path = setting(help="Hugging Face model directory, or a model's name on the hub")
    model_dtype: str = setting(
        AUTO,
        "number format in which the frozen target model is loaded; auto takes bf16 on a GPU for a model that "
        "is stored in 16 bits, if products are in bf16, and otherwise fp32",
        choices=(AUTO, *MODEL_DTYPES),
    )
    device_map: str | None = setting(
        None,
        "spread a target model that is too large for one device over all devices, then memory and disk, by "
        "accelerate; the heads are on the first device, where balanced_low_0 leaves most room",
        choices=("auto", "balanced", "balanced_low_0", "sequential"),
    )
    skip_bad_rows: bool = setting(False, "leave out rows of the data that cannot be used, and count them")
    max_samples: int | None = setting(None, "use at most this many prompts", minimum=1)
    max_length: int = setting(
        1024, "cut sequences to this many tokens; prompts that leave no room are left out", minimum=3
    )
    holdout: float = setting(
        0.02, "share of the sequences kept for evaluation", minimum=0, maximum=1, exclusive=True
    )
    data_seed: int = setting(
        0, "of the data's order, the anchors and the hold-out", minimum=0, maximum=LARGEST_SEED
    )

    labels: str = setting(
        "distill", "what follows a prompt: the model's own text, or the data's", choices=("distill", "data")
    )
    max_new_tokens: int = setting(128, "length of a distilled continuation", minimum=1)
    distill_batch_size: int = setting(64, "prompts a batch while distilling", minimum=1)
    cache_features: bool = setting(
        False, "keep the target model's hidden states of all data in the cache (2 bytes each)"
    )
    cache_dir: Path | None = setting(None, "where distilled text is kept (default OUT.run/cache)")
    target_layer_ids: tuple[int, ...] | None = setting(
        None, "decoder layers the heads read (default: early, middle, last)"
    )

    steps: int = setting(2000, "optimizer steps", minimum=1)
    batch_size: int = setting(16, "sequences a device and micro step", minimum=1)
    num_anchors: int = setting(48, "anchors a sequence", minimum=1)
    grad_accumulation: int = setting(1, "micro steps an optimizer step", minimum=1)
    optimizer: str = setting(
        "muon", "optimizer; Muon trains the matrices and AdamW the rest", choices=("adamw", "muon")
    )
    warmup: int = setting(100, "steps of linear warm-up, then cosine to zero", minimum=0)
    weight_decay: float = setting(0.01, "decoupled", minimum=0)
    max_grad_norm: float = setting(1.0, "gradient clipping, head by head", minimum=0, exclusive=True)
    precision: str = setting(
        AUTO,
        "number format of products, bf16 by autocast; auto takes bf16 on a GPU and on a CPU that has "
        "instructions for it, and otherwise fp32",
        choices=(AUTO, "bf16", "fp32"),
    )

    out: Path = setting(
        help="directory of the draft head, or of the heads; OUT.run beside it has checkpoint, logs and cache"
    )
    save_precision: str = setting(
        "fp32", "number format of the finished heads' weights on disk", choices=tuple(SAVE_DTYPES)
    )
    eval_every: int = setting(200, "steps between evaluations", minimum=1)
    save_every: int = setting(200, "steps between checkpoints", minimum=1)
    resume: bool = setting(False, "continue from the checkpoint in OUT.run; without one, begin")
    overwrite: bool = setting(False, "begin anew although OUT holds a head")
    allow_changed: bool = setting(False, "resume although model, data or settings have changed")

    heads: tuple[HeadConfig, ...] = (HeadConfig(),)
    base_model: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.out.resolve().name:
            raise TrainingError(f"--out: expected a directory with a name, got {str(self.out)!r}")
        if self.self_prompts and self.labels == "data":
            raise TrainingError(
                "--labels data: a prompt that the model wrote has no answer in the data; leave out "
                "--self-prompts or --labels"
            )
        if self.has_streams and self.model_dtype == "bf16":
            raise TrainingError(
                "--model-dtype: streams are trained in float32 layers of the model, got 'bf16'"
            )
        if self.has_streams and self.device_map:
            raise TrainingError(
                f"--device-map: streams need the model's layers on one device, got {self.device_map!r}"
            )

    @property
    def has_streams(self) -> bool:
        """Whether a head runs through layers of the target model, as speculative streams do."""
        return any(head.trunk_type.borrows_layers for head in self.heads)

    @property
    def model_name(self) -> str:
        """The target model's name, without a path of this machine."""
        return self.base_model or directory_name(self.model)

    @property
    def run_directory(self) -> Path:
        """The directory of checkpoint, logs and cache, beside OUT, so that OUT can be uploaded as it is."""
        out = self.out if self.out.name not in ("", "..") else self.out.resolve()
        return out.with_name(f"{out.name}.run")

    @property
    def cache_directory(self) -> Path:
        """The directory in which distilled text and features are kept."""
        return self.cache_dir or self.run_directory / "cache"

    def directory(self, head: HeadConfig) -> Path:
        """The directory into which a head is written."""
        return self.out / head.name


def parse_config(argv: list[str] | None, description: str) -> TrainingConfig:
    """The configuration that flags describe. ``--heads`` replaces the flags of a single head."""
    parser = Parser("train", "training.train", description)
    names = [field.name for field in flag_fields(TrainingConfig)]
    starts = [names.index(first) for first in GROUPS.values()]
    for title, start, end in zip(GROUPS, starts, [*starts[1:], None], strict=True):
        add_flags(parser.add_argument_group(title), TrainingConfig, names=names[start:end])
    group = parser.add_argument_group("the head")
    group.add_argument(
        "--heads", type=Path, help="TOML file with a [[head]] table each: train several at once"
    )
    group.add_argument(
        "--preset",
        help=f"settings of the head that the flags below replace (default for a ctc head: {RECOMMENDED}): "
        + ", ".join(PRESETS),
    )
    add_flags(group, HeadConfig, optional=True, instead=("with the preset ctc", PRESETS[RECOMMENDED]))
    values = parse_flags(parser, argv)
    file, preset = values.pop("heads"), values.pop("preset")
    own = {field.name: values.pop(field.name) for field in flag_fields(HeadConfig)}
    given = {name: value for name, value in own.items() if value is not None}
    if file is not None and (given or preset):
        name = "--preset" if preset else flag(next(iter(given)))
        raise TrainingError(f"{name}: belongs into {file}, because --heads is given")
    if preset and preset not in PRESETS:
        raise TrainingError(f"--preset: must be one of {', '.join(PRESETS)}, got {preset!r}")
    if preset and given.get("drafter_type", kind := PRESETS[preset]["drafter_type"]) != kind:
        raise TrainingError(
            f"--drafter-type: the preset {preset} is a {kind} head, got {given['drafter_type']!r}"
        )
    heads = read_heads(file) if file else (HeadConfig(**preset_settings(preset, given)),)
    return TrainingConfig(**values, heads=heads)
