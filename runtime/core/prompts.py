"""Prompt files, and chat messages in JSON. Clients use this module, so it imports no library.

A prompt file has one JSON object per line:

{"turns": [...]} or {"question": ...} or {"prompt": ...}   a user's message; of turns the first
{"messages": [...]} or {"conversations": [...]}           a conversation up to its last message of a user
{"text": ...}                                             text to continue as it is

A message has a role and a content:

    {"role": "user", "content": "Hi"}      OpenAI
    {"from": "human", "value": "Hi"}       ShareGPT

The content is text, or a list of parts {"type": "text", "text": "Hi"}. In OpenAI's form there may also be
calls of tools, which may have no content, and messages of the role ``tool`` with what a tool has returned.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from runtime.core.errors import RequestError

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
# What chat templates call the roles of both forms.
ROLES = {
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": SYSTEM,
    "developer": SYSTEM,
}


class Form(NamedTuple):
    """The keys of a message's role and content."""

    role: str
    content: str


OPENAI, SHAREGPT = Form("role", "content"), Form("from", "value")


class MessageError(ValueError):
    """A message that cannot be read; the error names the field, what was expected, and what is there."""


def read_role(message: Any, form: Form = OPENAI, *, roles: Mapping[str, str] = ROLES) -> str:
    """The role as chat templates call it. Raises MessageError for one that is missing or unknown.

    roles: the known ones
    """
    speaker = _field(message, form.role)
    if not isinstance(speaker, str):
        raise MessageError(f"field {form.role!r}: expected text, got {type(speaker).__name__}")
    if speaker not in roles:
        raise MessageError(f"field {form.role!r}: expected one of {', '.join(roles)}, got {speaker[:60]!r}")
    return roles[speaker]


def read_content(message: Any, form: Form = OPENAI, *, separator: str = "") -> str:
    """The text. Raises MessageError for content that is missing, or holds anything but text.

    separator: between the texts of several parts
    """
    content = _field(message, form.content)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(f"field {form.content!r}: expected text, got {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"field {form.content!r}: expected parts of the type 'text', got {kind!r}")
    return separator.join(part["text"] for part in content)


def read_conversation(value: Any) -> list[dict[str, Any]]:
    """A list of messages of either form, in OpenAI's. Names of speakers and calls of tools are kept.

    Raises MessageError for anything else.
    """
    if not isinstance(value, list) or not value:
        raise MessageError(f"expected a list of messages, got {str(value)[:60]!r}")
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(value, 1):
        form = SHAREGPT if isinstance(message, dict) and SHAREGPT.role in message else OPENAI
        try:
            role = read_role(message, form, roles={**ROLES, TOOL: TOOL} if form is OPENAI else ROLES)
            if role == ASSISTANT and message.get("tool_calls") and message.get("content") is None:
                message = {**message, "content": ""}
            read: dict[str, Any] = {"role": role, "content": read_content(message, form)}
        except MessageError as error:
            raise MessageError(f"message {number}: {error}") from error
        for name, kind in (("name", str), ("tool_call_id", str), ("tool_calls", list)):
            read |= {name: message[name]} if isinstance(message.get(name), kind) else {}
        messages.append(read)
    return messages


def _field(message: Any, name: str) -> Any:
    if not isinstance(message, dict) or name not in message:
        raise MessageError(f"field {name!r} of a message is missing")
    return message[name]


FIELDS = ("turns", "question", "prompt", "messages", "conversations", "text")


@dataclass(frozen=True)
class Prompt:
    """What a text is generated for.

    text: a user's message, or with ``raw`` text to continue as it is, without the chat template
    before: the messages before the user's, such as the system's
    """

    text: str
    raw: bool = False
    before: tuple[dict[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation, if it is not ``raw``."""
        return [*self.before, {"role": USER, "content": self.text}]

    def with_system(self, system: str | None) -> "Prompt":
        """The prompt after the system's message, if it has none of its own and is not ``raw``."""
        if system is None or self.raw or any(message["role"] == SYSTEM for message in self.before):
            return self
        return replace(self, before=({"role": SYSTEM, "content": system}, *self.before))


def read_text(option: str, path: Path) -> str:
    """The text of the file that an option names. Raises RequestError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"{option}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{option}: {path} is not UTF-8 (byte {error.start})") from None


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file. Raises RequestError naming file and line."""
    content = read_text("--prompts", path)
    prompts = []
    # splitlines() would also split at other line separators, such as U+2028, which prompts contain.
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            prompts.append(_prompt(f"{path}:{number}", line))
    if not prompts:
        raise RequestError(f"--prompts: {path} holds no prompt")
    return prompts


def _prompt(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"expected a JSON object, got {line[:60]!r}", field=where) from None
    field = next((name for name in FIELDS if isinstance(row, dict) and name in row), None)
    if field is None:
        raise RequestError(f"expected an object with {', '.join(FIELDS)}, got {line[:60]!r}", field=where)
    value = row[field]
    before: list[dict[str, str]] = []
    if field == "turns":
        value = value[0] if isinstance(value, list) and value else None
    elif field in ("messages", "conversations"):
        *before, last = _conversation(where, field, value)
        value = last["content"]
    if not isinstance(value, str):
        raise RequestError(f"{field} must hold text, got {json.dumps(row[field])[:60]}", field=where)
    if not (value if field == "text" else value.strip()):
        raise RequestError(f"{field} must not be empty", field=where)
    return Prompt(value, raw=field == "text", before=tuple(before))


def _conversation(where: str, field: str, value: Any) -> list[dict[str, str]]:
    """The messages up to the last one of a user: training data has an answer after it."""
    try:
        messages = read_conversation(value)
    except MessageError as error:
        raise RequestError(f"{field}: {error}", field=where) from error
    while messages and messages[-1]["role"] != USER:
        messages.pop()
    if not messages:
        raise RequestError(f"{field} must hold a message of a user", field=where)
    return messages


def stdin_text() -> str:
    """The text that is piped into the program. Raises RequestError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt: stdin is not UTF-8 (byte {error.start})") from None


def encode_utf8(name: str, text: str) -> bytes:
    """UTF-8 of the text of field ``name``.

    Raises RequestError for a lone surrogate: half of a character, as JSON and command lines can hold it.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"must be valid Unicode, got a lone surrogate at {error.start}", field=name
        ) from None
