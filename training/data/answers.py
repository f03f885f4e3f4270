"""The prompts of ``ctc distill``, and the file of answers."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.core.jsonl_store import JsonlStore
from training.data.conversations import Turn, plain_messages, plain_prompt, read_turns
from training.data.self_prompts import repeats_itself
from training.settings import DistillConfig, TrainingError


@dataclass(frozen=True)
class Prompt:
    """A prompt as the body of a request: ``messages``, or the ``prompt`` of a raw continuation.

    id: hash of the prompt and of everything its answer depends on
    """

    id: str
    body: dict[str, Any]

    def row(self, text: str, reason: str | None, *, verbatim: bool) -> dict[str, Any]:
        """The prompt with its answer as a row of data; ``verbatim``: whether it follows to the letter."""
        if "prompt" in self.body:
            return {"finish_reason": reason, **self.body, "completion": text, "raw": True}
        # Earlier answers are from the data. The model did not write them, so they are context and not
        # learned.
        history = [m | {"weight": 0} if m["role"] == "assistant" else m for m in self.body["messages"]]
        messages = [*history, {"role": "assistant", "content": text}]
        return {"finish_reason": reason, "messages": messages} | ({"verbatim": True} if verbatim else {})


def read_prompts(config: DistillConfig, own: Sequence[str] = (), *, model: str | None = None) -> list[Prompt]:
    """The distinct prompts of the data in its order, then ``own``, the prompts that the model wrote.

    model: what tells the model from others, by default its name
    Raises TrainingError naming file, line and field.
    """
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
    if config.data and not bodies:
        raise TrainingError("--data: every prompt is empty")
    # The choice by hash takes a share of every file, and a larger limit adds prompts to the same ones.
    chosen = set(sorted(bodies)[: config.max_samples])
    written = [{"messages": [{"role": "user", "content": text}]} for text in own]
    bodies |= (more := {_digest(body): body for body in written})
    chosen |= more.keys()
    asked = [model or config.model_name, config.max_new_tokens, config.extra_body]
    return [
        Prompt(_digest([digest, *asked])[:32], body) for digest, body in bodies.items() if digest in chosen
    ]


@contextmanager
def open_answers(config: DistillConfig, model: str | None = None) -> Iterator[tuple[JsonlStore, set[str]]]:
    """The file of answers, locked within the block, and the ids of the prompts that it answers already.

    model: as of ``read_prompts``
    Training reads the file, so it holds only answers. Raises UserError for a file that cannot be written,
    that another run writes, or that holds anything but answers with these settings.
    """
    answered: set[str] = set()
    settings: dict[str, Any] = {
        "model": model or config.model_name,
        "max_new_tokens": config.max_new_tokens,
    }
    if config.base_url is not None:
        settings["extra_body"] = config.extra_body
    answers = JsonlStore(
        config.out,
        settings,
        lambda row: answered.add(row["id"]),
        first_field="id",
        alone=True,
    )
    with closing(answers):
        yield answers, answered


def answers_report(path: Path, num_answered: int, *, of: int) -> str:
    """Lines about a file of ``open_answers``: how many prompts have answers, and of what kind they are."""
    if not path.exists():  # because it would hold nothing
        return f"{path} is not written: {num_answered} of {of} prompts answered"
    num_answers = num_cut = num_repeating = 0
    with path.open(encoding="utf-8") as stream:
        for row in map(json.loads, stream):
            text = row["completion"] if "completion" in row else row["messages"][-1]["content"]
            num_answers += 1
            num_cut += row["finish_reason"] == "length"
            num_repeating += repeats_itself(text)
    return (
        f"wrote {path}: {num_answered} of {of} prompts answered\n"
        f"of {num_answers:,} answers {num_cut:,} reach --max-new-tokens, and {num_repeating:,} repeat "
        "themselves"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
