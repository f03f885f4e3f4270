"""What the settings of training and distillation share, and the settings of ``ctc distill``."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from drafters.config import check_settings, setting
from runtime.core.cli import directory_name
from runtime.core.errors import UserError

# The largest seed that every random generator takes.
LARGEST_SEED = 2**32 - 1
# The values of --model-dtype, and the names of torch's types for them.
AUTO = "auto"
MODEL_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class TrainingError(UserError):
    """Data or a setting that training cannot use; the message names it."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """The prompts, from data or written by the model, for training and ``ctc distill``."""

    data: tuple[Path, ...] = setting(
        (),
        "files of conversations, messages, prompts, instructions, questions or text (.jsonl, .json, "
        ".jsonl.gz, .parquet), or names of data sets on the hub (OWNER/NAME:SPLIT)",
    )
    self_prompts: int | None = setting(
        None, "let the model write this many prompts itself, beside or in place of --data", minimum=1
    )
    prompt_temperature: float = setting(
        0.8,
        "temperature of self-written prompts; a higher one gives more kinds and more nonsense",
        minimum=0,
        exclusive=True,
    )
    prompt_top_p: float = setting(0.95, "nucleus of self-written prompts", minimum=0.001, maximum=1)
    max_prompt_tokens: int = setting(
        96, "length of a self-written prompt; longer ones are left out", minimum=1
    )
    prompt_systems: tuple[str, ...] = setting(
        (),
        "system messages under which the model writes its prompts, in turn, to have kinds that it seldom "
        "writes, such as code; the answers do not see them (default: the template's own)",
    )

    def __post_init__(self) -> None:
        check_settings(self, lambda name, problem: TrainingError(f"{flag(name)}: {problem}"))
        if not (self.data or self.self_prompts):
            raise TrainingError("--data: expected files of prompts, or --self-prompts N, got neither")


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def flag_fields(settings: type) -> list[dataclasses.Field[Any]]:
    """The settings of a dataclass that have a flag."""
    return [field for field in dataclasses.fields(settings) if field.metadata.get("help")]


def add_flags(
    parser: Any,
    settings: type,
    *,
    names: Sequence[str] | None = None,
    optional: bool = False,
    instead: tuple[str, dict[str, Any]] = ("", {}),
) -> None:
    """Add a flag for every setting of a dataclass, beginning with those that must be given.

    names: the settings to add; None adds all
    optional: whether a flag that is not given is None
    instead: the case in which other defaults hold, in words, and these defaults; for the help text
    """
    declared = [field for field in flag_fields(settings) if names is None or field.name in names]
    for field in sorted(declared, key=lambda field: field.default is not dataclasses.MISSING):
        required = field.default is dataclasses.MISSING and not optional
        help_text, options = field.metadata["help"], _value_options(field.type)
        if field.metadata["choices"]:
            help_text += f": {', '.join(field.metadata['choices'])}"
        if not (required or field.default in (None, False, ())):
            also = f", {instead[0]} {instead[1][field.name]}" if field.name in instead[1] else ""
            help_text += f" (default {field.default}{also})"
        if required:
            options["required"] = True
        else:
            options["default"] = None if optional else field.default
        parser.add_argument(flag(field.name), help=help_text, **options)


def parse_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> dict[str, Any]:
    """Values by setting; lists become tuples."""
    values = vars(parser.parse_args(argv))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _value_options(kind: Any) -> dict[str, Any]:
    """The options with which argparse reads a value of this type, such as ``tuple[Path, ...] | None``."""
    plain = kind
    while get_args(plain):
        plain = get_args(plain)[0]
    if plain is bool:
        return {"action": "store_true"}
    return {"type": plain} | ({"nargs": "+"} if "tuple" in str(kind) else {})


@dataclass(frozen=True, kw_only=True)
class DistillConfig(PromptSettings):
    """Every flag of ``python -m training.distill``."""

    model: str = setting(
        help="Hugging Face model directory, or a model's name on the hub; with --base-url the name that the "
        "server gives it"
    )
    out: Path = setting(help="jsonl file of the answers; what it holds is not asked again")
    seed: int = setting(
        0, "of self-written prompts; a server may not heed it", minimum=0, maximum=LARGEST_SEED
    )
    max_new_tokens: int = setting(512, "length of an answer in tokens", minimum=1)
    max_samples: int | None = setting(None, "ask for at most this many prompts of the data", minimum=1)
    completions: bool = setting(False, "raw continuations, without a chat template")
    batch_size: int = setting(64, "prompts at a time, without --base-url", minimum=1)
    model_dtype: str = setting(
        AUTO,
        "number format in which the model is loaded, without --base-url; auto takes bf16 on a GPU and on a "
        "CPU that has instructions for it, and otherwise fp32",
        choices=(AUTO, *MODEL_DTYPES),
    )
    base_url: str | None = setting(
        None, "ask a server, of whose API this is the address, such as http://localhost:8000/v1"
    )
    chat_template: Path | None = setting(
        None,
        "model directory with the tokenizer of the served model; --self-prompts needs its chat template, and "
        "/completions of the server",
    )
    concurrency: int = setting(32, "requests to a server at a time", minimum=1)
    timeout: float = setting(600.0, "seconds until a request is tried again", minimum=0, exclusive=True)
    max_retries: int = setting(5, "further tries of a request that failed", minimum=0)
    api_key_env: str | None = setting(
        None, "environment variable with the API key (default OPENAI_API_KEY, if set)"
    )
    extra_body: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_systems and not self.self_prompts:
            raise TrainingError("--prompt-systems: is for --self-prompts N, which is missing")
        if self.self_prompts and self.base_url and self.chat_template is None:
            raise TrainingError(
                "--chat-template: --self-prompts with a server needs the directory of the served model, for "
                "its chat template"
            )
        if self.self_prompts and self.completions:
            raise TrainingError("--completions: --self-prompts gives users' messages, which need a template")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise TrainingError(f"--api-key-env: {self.api_key_env} is not set in the environment")
        if self.extra_body and self.base_url is None:
            raise TrainingError("--extra-body: is for the requests to a server, got no --base-url")
        if self.base_url is not None:
            self._check_server(self.base_url)
        if self.out.suffix in (".gz", ".parquet"):
            raise TrainingError(
                f"--out: expected a file of plain JSON lines, such as answers.jsonl, got {self.out.name!r}"
            )
        if self.out.exists() and not self.out.is_file():
            raise TrainingError(f"--out: {self.out} is no file")
        if self.out.exists() and any(path.exists() and path.samefile(self.out) for path in self.data):
            raise TrainingError(f"--out: {self.out} is one of the files of --data")

    def _check_server(self, url: str) -> None:
        """Raises TrainingError for an address and a key that the client of the server cannot send."""
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address:
            raise TrainingError(
                f"--base-url: expected an address such as http://localhost:8000/v1, got {url!r}"
            )
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            name = self.api_key_env or "OPENAI_API_KEY"
            raise TrainingError(f"--api-key-env: {name} holds characters that no API key has")

    @property
    def prompts_path(self) -> Path:
        """The file that keeps self-written prompts until they are answered."""
        return self.out.with_name(f"{self.out.stem}.prompts.jsonl")

    @property
    def model_name(self) -> str:
        """The model's name for the records of the answers, without a path of this machine."""
        return self.model if self.base_url else directory_name(Path(self.model))

    @property
    def api_key(self) -> str:
        """The API key in the environment. A local server needs none, but the client refuses an empty one."""
        return os.environ.get(self.api_key_env or "OPENAI_API_KEY") or "none"
