"""The settings of a run of ``training.openai_distill``, its prompts, and the rows that its answers become."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafters.settings import check_settings, setting
from training.conversations import Turn, plain_messages, plain_prompt, read_turns
from training.errors import TrainingError
from training.flags import flag


@dataclass(frozen=True)
class ServerConfig:
    """Every flag of ``python -m training.openai_distill``."""

    base_url: str = setting(help="of the server's API, such as http://localhost:8000/v1")
    model: str = setting(help="the name under which the server serves the model")
    data: tuple[Path, ...] = setting(help="jsonl files, as training.train reads them")
    out: Path = setting(help="jsonl file of the answers; what it holds is not asked again")
    concurrency: int = setting(32, "requests at a time", minimum=1)
    max_new_tokens: int = setting(512, "length of an answer in tokens", minimum=1)
    completions: bool = setting(False, "raw continuations from /completions, without a chat template")
    max_samples: int | None = setting(None, "ask for at most this many prompts", minimum=1)
    timeout: float = setting(600.0, "seconds until a request is tried again", minimum=0, exclusive=True)
    max_retries: int = setting(5, "further tries of a request that failed", minimum=0)
    api_key_env: str | None = setting(
        None, "environment variable with the API key (default OPENAI_API_KEY, if set)"
    )
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self, lambda name, problem: TrainingError(f"{flag(name)}: {problem}"))
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise TrainingError(f"--api-key-env: {self.api_key_env} is not set in the environment")
        if self.out.exists() and not self.out.is_file():
            raise TrainingError(f"--out: {self.out} is no file")
        if self.out.exists() and any(path.exists() and path.samefile(self.out) for path in self.data):
            raise TrainingError(f"--out: {self.out} is one of the files of --data")

    @property
    def api_key(self) -> str:
        """From the environment. A local server needs none, but the client refuses an empty one."""
        return os.environ.get(self.api_key_env or "OPENAI_API_KEY") or "none"


@dataclass(frozen=True)
class Prompt:
    """The body of a request: ``messages``, or the ``prompt`` of a raw continuation.

    id: hash of the prompt and of everything its answer depends on
    """

    id: str
    body: dict[str, Any]

    def row(self, text: str, reason: str | None) -> dict[str, Any]:
        """The prompt with its answer, as ``training.conversations`` reads it."""
        if "prompt" in self.body:
            return {"finish_reason": reason, **self.body, "completion": text, "raw": True}
        # Earlier answers are the data's, not the model's: they are context, and not learned.
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
    # Chosen by hash: a share of every file, and a larger limit adds prompts to the same ones.
    chosen = set(sorted(bodies)[: config.max_samples])
    asked = [config.model, config.max_new_tokens, config.extra_body]
    return [
        Prompt(_digest([digest, *asked])[:32], body) for digest, body in bodies.items() if digest in chosen
    ]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
