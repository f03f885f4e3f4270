"""Prompts: files of them, and their text as bytes. Clients use this module, so it imports no library.

A prompt file has one JSON object per line:

{"turns": [...]} or {"question": ...} or {"prompt": ...}   a user's message; of turns the first
{"messages": [...]} or {"conversations": [...]}           a conversation up to its last message of a user
{"text": ...}                                             text to continue as it is
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.core.errors import RequestError
from runtime.core.messages import SYSTEM, USER, MessageError, read_conversation

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
    except json.JSONDecodeError:
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
    if not value.strip():
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
