"""Reads prompts from the usual formats of conversations.

One JSON object a line (or one JSON array), in any of these forms:

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": ..., "completion": ...}      {"question": ..., "answer": ...}
    {"turns": [...]}                        {"text": ...}

A conversation gives one prompt for every assistant turn. Optional fields describe an answer:

    "finish_reason": "length"   the last answer was cut off, so no end of text follows it
    "weight": 0                 of an assistant message: history only, neither prompt nor answer
    "raw": true                 with prompt and completion: plain text, without the chat template
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from training.errors import TrainingError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = "conversations, messages, prompt, question, turns or text"
# Of a plain text, this share of its tokens is the prompt.
TEXT_PROMPT_SHARE = 0.3

Message = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """A user's turn: the conversation up to and with it, and the data's answer, if it has one.

    messages: role and content each, the user's last
    finished: whether the answer ends where its author ended
    """

    messages: list[Message]
    answer: str | None
    finished: bool = True


@dataclass(frozen=True)
class PlainText:
    """Text that no chat template is put around.

    prompt_length: how many characters of it are the prompt; None: the reader decides
    finished: whether the text ends where its author ended
    """

    text: str
    prompt_length: int | None = None
    finished: bool = False


@dataclass(frozen=True)
class Example:
    """A prompt, and the data's own continuation of it, if it has one."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


def read_turns(path: Path) -> list[Turn | PlainText]:
    """All prompts of a data file, before any tokenizer. Raises TrainingError naming file, line and field."""
    return _read(path, _turns)


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """All prompts of a data file as token ids. Raises TrainingError naming file, line and field."""

    def examples(row: Any) -> Iterator[Example]:
        found = (_example(turn, tokenizer) for turn in _turns(row))
        return (example for example in found if example.prompt_ids)

    return _read(path, examples)


def _read(path: Path, convert: Callable[[Any], Iterable[T]]) -> list[T]:
    found: list[T] = []
    for where, row in _rows(path):
        try:
            found.extend(convert(row))
        except (ValueError, TemplateError) as error:
            raise TrainingError(f"{where}: {error}; got {_brief(row)}") from error
    if not found:
        raise TrainingError(f"--data: {path} holds no prompt")
    return found


def plain_prompt(text: PlainText) -> str:
    """The prompt of a plain text where there is no tokenizer: whole words of its first characters."""
    if text.prompt_length is not None:
        return text.text[: text.prompt_length]
    cut = max(1, int(len(text.text) * TEXT_PROMPT_SHARE))
    # Ends with a word, because the space after it belongs to the next token.
    words = re.match(rf".{{1,{cut}}}(?<=\S)(?!\S)", text.text, re.DOTALL)
    return words[0] if words else text.text[:cut]


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row of a file: its place, for messages, and its value."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TrainingError(f"--data: {path} does not exist") from None
    except OSError as error:
        raise TrainingError(f"--data: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainingError(f"--data: {path} is not UTF-8 (byte {error.start})") from error
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path} is not valid JSON: {error}") from error
        for index, row in enumerate(rows):
            yield f"{path}[{index}]", row
        return
    # Not splitlines(): texts hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path}:{number}: expected a JSON object, got {_brief(line)}") from error
        yield f"{path}:{number}", row


def _turns(row: Any) -> Iterator[Turn | PlainText]:
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    reason = row.get("finish_reason")
    if "conversations" in row:
        yield from _user_turns(row["conversations"], "conversations", "from", "value", reason)
    elif "messages" in row:
        yield from _user_turns(row["messages"], "messages", "role", "content", reason)
    elif "turns" in row:
        yield from (Turn([_user(text, "turns")], None) for text in _list(row["turns"], "turns")[:1])
    elif "prompt" in row or "question" in row:
        question, answer = ("prompt", "completion") if "prompt" in row else ("question", "answer")
        message = _user(row[question], question)
        follows = None if row.get(answer) is None else _text(row[answer], answer)
        if row.get("raw") is True:
            prompt = message["content"]
            yield PlainText(prompt + (follows or ""), len(prompt), reason == "stop")
        else:
            yield Turn([message], follows, reason != "length")
    elif "text" in row:
        yield PlainText(_text(row["text"], "text"))
    else:
        raise ValueError(f"expected a field {FORMS}")


def _user_turns(entries: Any, field: str, role: str, content: str, reason: Any) -> Iterator[Turn]:
    """A turn for every user's message, except those whose answer is history only."""
    entries = _list(entries, field)
    messages = [_message(entry, role, content) for entry in entries]
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        follows = messages[index + 1 : index + 2]
        answer = follows[0]["content"] if follows and follows[0]["role"] == "assistant" else None
        if answer is not None and entries[index + 1].get("weight") == 0:
            continue
        last = index + 2 == len(messages)
        yield Turn(messages[: index + 1], answer, not (last and reason == "length"))


def _example(turn: Turn | PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    """A turn as token ids; without prompt ids where it holds no prompt."""
    if isinstance(turn, PlainText):
        return _text_example(turn, tokenizer)
    prompt = _render(turn.messages, tokenizer, add_generation_prompt=True)
    if turn.answer is None:
        return Example(prompt, None)
    messages = [*turn.messages, {"role": "assistant", "content": turn.answer}]
    # After an answer that was cut off, the end of text that a template writes would be wrong.
    whole = _render(messages, tokenizer, continue_final_message=not turn.finished)
    # A template may rewrite earlier turns; its text cannot be cut at the prompt then.
    return Example(prompt, whole[len(prompt) :] if whole[: len(prompt)] == prompt else None)


def _text_example(text: PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    ids = list(tokenizer(text.text)["input_ids"])
    if text.prompt_length is None:
        cut = max(1, int(len(ids) * TEXT_PROMPT_SHARE))
        return Example(ids[:cut], ids[cut:]) if len(ids) > 1 else Example([], None)
    prompt = list(tokenizer(text.text[: text.prompt_length])["input_ids"])
    if text.prompt_length == len(text.text) or ids[: len(prompt)] != prompt:
        return Example(prompt, None)
    end = [tokenizer.eos_token_id] if text.finished and tokenizer.eos_token_id is not None else []
    return Example(prompt, ids[len(prompt) :] + end)


def _render(messages: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return list(tokenizer(plain_messages(messages))["input_ids"])


def plain_messages(messages: list[Message]) -> str:
    """A conversation for a model without a chat template."""
    return "\n".join(message["content"] for message in messages)


def _message(entry: Any, role: str, content: str) -> Message:
    for field in (role, content):
        if not isinstance(entry, dict) or field not in entry:
            raise ValueError(f"field {field!r} of a message is missing")
    speaker = _text(entry[role], role)
    if speaker not in ROLES:
        raise ValueError(f"field {role!r}: expected one of {', '.join(ROLES)}, got {_brief(speaker)}")
    return {"role": ROLES[speaker], "content": _text(entry[content], content)}


def _user(value: Any, field: str) -> Message:
    return {"role": "user", "content": _text(value, field)}


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"field {field!r}: expected a list, got {type(value).__name__}")
    return list(value)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {field!r}: expected text, got {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can hold it, but tokenizers and servers refuse it.
        raise ValueError(f"field {field!r}: holds a lone surrogate at {error.start}") from None
    return value


def _brief(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text[:60])
