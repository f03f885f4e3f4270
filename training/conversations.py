"""Training data as people have it, to prompts.

One JSON object a line (or one JSON array), in any of these forms:

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": ..., "completion": ...}      {"question": ..., "answer": ...}
    {"turns": [...]}                        {"text": ...}

A conversation gives one prompt for every assistant turn.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from training.errors import TrainingError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = "conversations, messages, prompt, question, turns or text"
# Of a plain text, this share of its tokens is the prompt.
TEXT_PROMPT_SHARE = 0.3


@dataclass(frozen=True)
class Example:
    """A prompt, and what the data itself says comes next (None where it does not say)."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """All prompts of a data file. Raises TrainingError naming file, line and field."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TrainingError(f"--data: {path} does not exist") from None
    except OSError as error:
        raise TrainingError(f"--data: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"--data: {path} is not UTF-8 (byte {error.start})") from error
    examples = []
    for where, row in _rows(path, text):
        try:
            examples.extend(_examples(row, tokenizer))
        except (ValueError, TemplateError) as error:
            raise TrainingError(f"{where}: {error}; got {_brief(row)}") from error
    if not examples:
        raise TrainingError(f"--data: {path} holds no prompt")
    return examples


def _rows(path: Path, text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            return [(f"{path}[{index}]", row) for index, row in enumerate(json.loads(text))]
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path} is not valid JSON: {error}") from error
    rows = []
    # Not splitlines(): texts hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}:{number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path}:{number}: expected a JSON object, got {_brief(line)}") from error
    return rows


def _examples(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    if "conversations" in row:
        messages = [_message(entry, "from", "value") for entry in _list(row, "conversations")]
    elif "messages" in row:
        messages = [_message(entry, "role", "content") for entry in _list(row, "messages")]
    elif "turns" in row:
        messages = [{"role": "user", "content": _text(turn, "turns")} for turn in _list(row, "turns")[:1]]
    elif "prompt" in row or "question" in row:
        question, answer = ("prompt", "completion") if "prompt" in row else ("question", "answer")
        messages = [{"role": "user", "content": _text(row[question], question)}]
        if row.get(answer) is not None:
            messages.append({"role": "assistant", "content": _text(row[answer], answer)})
    elif "text" in row:
        ids = tokenizer(_text(row["text"], "text"))["input_ids"]
        cut = max(1, int(len(ids) * TEXT_PROMPT_SHARE))
        return [Example(ids[:cut], ids[cut:])] if len(ids) > 1 else []
    else:
        raise ValueError(f"expected a field {FORMS}")
    return _turns(messages, tokenizer)


def _turns(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    examples = []
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        prompt = _render(messages[: index + 1], tokenizer, generation=True)
        following = messages[index + 1 : index + 2]
        answer = None
        if following and following[0]["role"] == "assistant":
            whole = _render(messages[: index + 2], tokenizer, generation=False)
            # A template that rewrites earlier turns cannot be cut at the prompt.
            answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else None
        if prompt:
            examples.append(Example(prompt, answer))
    return examples


def _render(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, *, generation: bool
) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer("\n".join(m["content"] for m in messages))["input_ids"])


def _message(entry: Any, role: str, content: str) -> dict[str, str]:
    for field in (role, content):
        if not isinstance(entry, dict) or field not in entry:
            raise ValueError(f"field {field!r} of a message is missing")
    speaker = _text(entry[role], role)
    if speaker not in ROLES:
        raise ValueError(f"field {role!r}: expected one of {', '.join(ROLES)}, got {_brief(speaker)}")
    return {"role": ROLES[speaker], "content": _text(entry[content], content)}


def _list(row: dict[str, Any], field: str) -> list[Any]:
    if not isinstance(row[field], list):
        raise ValueError(f"field {field!r}: expected a list, got {type(row[field]).__name__}")
    return list(row[field])


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {field!r}: expected text, got {type(value).__name__}")
    return value


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text[:60])
