"""The settings of ``ctc distill``."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafters.settings import check_settings, setting
from training.settings import SelfPromptSettings, TrainingError, flag


@dataclass(frozen=True)
class DistillConfig(SelfPromptSettings):
    """Every flag of ``python -m training.distill``."""

    model: str = setting(
        help="Hugging Face model directory, or a model's name on the hub; with --base-url the name that the "
        "server gives it"
    )
    out: Path = setting(help="jsonl file of the answers; what it holds is not asked again")
    data: tuple[Path, ...] = setting((), "jsonl files, as training.train reads them")
    seed: int = setting(0, "of self-written prompts; a server may not heed it")
    max_new_tokens: int = setting(512, "length of an answer in tokens", minimum=1)
    max_samples: int | None = setting(None, "ask for at most this many prompts of the data", minimum=1)
    completions: bool = setting(False, "raw continuations, without a chat template")
    batch_size: int = setting(64, "prompts at a time, without --base-url", minimum=1)
    model_dtype: str = setting(
        "bf16",
        "number format in which the model is loaded, without --base-url",
        choices=("bf16", "fp32"),
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
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self, lambda name, problem: TrainingError(f"{flag(name)}: {problem}"))
        if not (self.data or self.self_prompts):
            raise TrainingError("--data: expected files of prompts, or --self-prompts N, got neither")
        if self.self_prompts and self.base_url and self.chat_template is None:
            raise TrainingError(
                "--chat-template: --self-prompts with a server needs the directory of the served model, for "
                "its chat template"
            )
        if self.self_prompts and self.completions:
            raise TrainingError("--completions: --self-prompts gives users' messages, which need a template")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise TrainingError(f"--api-key-env: {self.api_key_env} is not set in the environment")
        if self.out.exists() and not self.out.is_file():
            raise TrainingError(f"--out: {self.out} is no file")
        if self.out.exists() and any(path.exists() and path.samefile(self.out) for path in self.data):
            raise TrainingError(f"--out: {self.out} is one of the files of --data")

    @property
    def prompts_path(self) -> Path:
        """The file that keeps self-written prompts until they are answered."""
        return self.out.with_name(f"{self.out.stem}.prompts.jsonl")

    @property
    def prompt_seed(self) -> int:
        """The seed with which self-written prompts are drawn."""
        return self.seed

    @property
    def model_name(self) -> str:
        """The model's name for the records of the answers, without a path of this machine."""
        return self.model if self.base_url else Path(self.model).absolute().name

    @property
    def api_key(self) -> str:
        """The API key in the environment. A local server needs none, but the client refuses an empty one."""
        return os.environ.get(self.api_key_env or "OPENAI_API_KEY") or "none"
