"""Reads prompts from the usual formats of conversations.

One JSON object a row, in any of these forms (``training.rows`` has the kinds of files):

    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}   ShareGPT
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    {"prompt": [messages], "completion": [messages]}   TRL, conversational
    {"prompt": ..., "completion": ...}      {"question": ..., "answer": ...}
    {"instruction": ..., "input": ..., "output": ...}   Alpaca; "input" may be empty or absent
    {"turns": [...]}                        {"text": ...}

The content of a message is text, or a list of parts {"type": "text", "text": ...} as OpenAI has it. A
conversation gives one prompt for every assistant turn. Optional fields describe an answer:

    "finish_reason": "length"   the last answer was cut off, so no end of text follows it
    "weight": 0                 of an assistant message: history only, neither prompt nor answer
    "raw": true                 with prompt and completion: plain text, without the chat template
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.core.messages import OPENAI, SHAREGPT, Form, read_content, read_role
from training.errors import TrainingError
from training.rows import BadRows, brief, read_rows

FORMS = "conversations, messages, prompt, question, instruction, turns or text"
# Of a plain text, this share of its tokens is the prompt.
TEXT_PROMPT_SHARE = 0.3

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """A user's turn: the conversation up to and with it, and the data's answer, if it has one.

    messages: role and content each, the user's last
    finished: whether the answer ends where its author ended
    where: its place in the data, for messages
    """

    messages: list[Message]
    answer: str | None
    finished: bool = True
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class PlainText:
    """Text that no chat template is put around.

    prompt_length: how many characters of it are the prompt; None: the reader decides
    finished: whether the text ends where its author ended
    where: its place in the data, for messages
    """

    text: str
    prompt_length: int | None = None
    finished: bool = False
    where: str = field(default="", compare=False)


def read_turns(path: Path, bad: BadRows | None = None) -> list[Turn | PlainText]:
    """All prompts of a data file, before any tokenizer.

    Raises TrainingError naming file, line and field, for a row that cannot be used unless ``bad`` skips it.
    """
    bad = bad or BadRows()
    found: list[Turn | PlainText] = []
    for where, row in read_rows(path, bad):
        try:
            found.extend(replace(turn, where=where) for turn in list(_turns(row)))
        except ValueError as error:
            bad.refuse(f"{where}: {error}; got {brief(row)}")
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


def _turns(row: Any) -> Iterator[Turn | PlainText]:
    if not isinstance(row, dict):
        raise ValueError("expected a JSON object")
    reason = row.get("finish_reason")
    if "conversations" in row:
        yield from _user_turns(row["conversations"], "conversations", SHAREGPT, reason)
    elif "messages" in row:
        yield from _user_turns(row["messages"], "messages", OPENAI, reason)
    elif "turns" in row:
        yield from (Turn([_user(text, "turns")], None) for text in _list(row["turns"], "turns")[:1])
    elif isinstance(row.get("prompt"), list):
        yield _conversational(row["prompt"], row.get("completion"), reason)
    elif "prompt" in row or "question" in row:
        question, answer = ("prompt", "completion") if "prompt" in row else ("question", "answer")
        message = _user(row[question], question)
        follows = None if row.get(answer) is None else _text(row[answer], answer)
        if row.get("raw") is True:
            prompt = message["content"]
            yield PlainText(prompt + (follows or ""), len(prompt), reason == "stop")
        else:
            yield Turn([message], follows, reason != "length")
    elif "instruction" in row:
        text = _text(row["instruction"], "instruction")
        further = _text(row.get("input", ""), "input")
        follows = None if row.get("output") is None else _text(row["output"], "output")
        yield Turn([_user(f"{text}\n\n{further}" if further else text, "instruction")], follows)
    elif "text" in row:
        yield PlainText(_text(row["text"], "text"))
    else:
        raise ValueError(f"expected a field {FORMS}")


def _user_turns(entries: Any, field: str, form: Form, reason: Any) -> Iterator[Turn]:
    """A turn for every user's message, except those whose answer is history only."""
    entries = _list(entries, field)
    messages = [_message(entry, form) for entry in entries]
    for index, message in enumerate(messages):
        if message["role"] != "user":
            continue
        follows = messages[index + 1 : index + 2]
        answer = follows[0]["content"] if follows and follows[0]["role"] == "assistant" else None
        if answer is not None and entries[index + 1].get("weight") == 0:
            continue
        last = index + 2 == len(messages)
        yield Turn(messages[: index + 1], answer, not (last and reason == "length"))


def _conversational(prompt: list[Any], completion: Any, reason: Any) -> Turn:
    """A prompt of messages and, if it is there, a completion that begins with the assistant's."""
    messages = [_message(entry, OPENAI) for entry in prompt]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("field 'prompt': expected messages of which the user's is the last")
    answers = [_message(entry, OPENAI) for entry in _list(completion or [], "completion")]
    if answers and answers[0]["role"] != "assistant":
        raise ValueError("field 'completion': expected an assistant's message first")
    last = len(answers) == 1
    return Turn(messages, answers[0]["content"] if answers else None, not (last and reason == "length"))


def plain_messages(messages: list[Message]) -> str:
    """A conversation for a model without a chat template."""
    return "\n".join(message["content"] for message in messages)


def _message(entry: Any, form: Form) -> Message:
    role, text = read_role(entry, form), read_content(entry, form)
    return {"role": role, "content": _text(text, form.content)}


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
