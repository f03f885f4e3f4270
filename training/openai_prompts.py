"""What a served model is asked: the settings of a run, its prompts, and the rows its answers make."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.conversations import Turn, plain_messages, plain_prompt, read_turns
from training.errors import TrainingError


@dataclass(frozen=True)
class ServerConfig:
    """Every flag of ``python -m training.openai_distill``."""

    base_url: str
    model: str
    data: tuple[Path, ...]
    out: Path
    concurrency: int = 32
    max_new_tokens: int = 512
    completions: bool = False
    max_samples: int | None = None
    timeout: float = 600.0
    max_retries: int = 5
    api_key_env: str | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {"concurrency": 1, "max_new_tokens": 1, "max_samples": 1, "max_retries": 0}
        for name, least in limits.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise TrainingError(f"--{name.replace('_', '-')}: must be at least {least}, got {value}")
        if not self.timeout > 0:
            raise TrainingError(f"--timeout: must be more than 0 seconds, got {self.timeout:g}")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise TrainingError(f"--api-key-env: {self.api_key_env} is not set in the environment")
        if self.out.exists() and not self.out.is_file():
            raise TrainingError(f"--out: {self.out} is no file")
        if self.out.exists() and any(path.exists() and path.samefile(self.out) for path in self.data):
            raise TrainingError(f"--out: {self.out} is one of the files of --data")

    @property
    def api_key(self) -> str:
        """From the environment. A server of one's own asks for none, but the client insists on one."""
        return os.environ.get(self.api_key_env or "OPENAI_API_KEY") or "none"


@dataclass(frozen=True)
class Prompt:
    """A request's own part: ``messages``, or the ``prompt`` of a raw continuation.

    id: hash of the prompt and of all that decides its answer
    """

    id: str
    body: dict[str, Any]

    def row(self, text: str, reason: str | None) -> dict[str, Any]:
        """The prompt with its answer, as ``training.conversations`` reads it."""
        if "prompt" in self.body:
            return {"finish_reason": reason, **self.body, "completion": text, "raw": True}
        # Earlier answers came with the data: context for this one, not something to learn.
        history = [m | {"weight": 0} if m["role"] == "assistant" else m for m in self.body["messages"]]
        return {"finish_reason": reason, "messages": [*history, {"role": "assistant", "content": text}]}


def read_prompts(config: ServerConfig) -> list[Prompt]:
    """The distinct prompts of the data, in its order. Raises TrainingError naming file, line and field."""
    bodies: dict[str, dict[str, Any]] = {}
    for path in config.data:
        for turn in read_turns(path):
            if isinstance(turn, Turn):
                chat, text = turn.messages, plain_messages(turn.messages)
            elif config.completions:
                chat, text = [], plain_prompt(turn)
            else:
                raise TrainingError(f"--data: {path} holds plain text, which is no chat: add --completions")
            body = {"prompt": text} if config.completions else {"messages": chat}
            if text:
                bodies[_digest(body)] = body
    if not bodies:
        raise TrainingError("--data: every prompt is empty")
    # By hash: a share of every file, and with a larger limit the same prompts and more.
    chosen = set(sorted(bodies)[: config.max_samples])
    asked = [config.model, config.max_new_tokens, config.extra_body]
    return [
        Prompt(_digest([digest, *asked])[:32], body) for digest, body in bodies.items() if digest in chosen
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
