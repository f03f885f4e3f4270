"""Prompts: files of them, and their text as bytes. Clients use this module, so it imports no library.

A prompt file has one JSON object per line:

{"turns": [...]} or {"question": ...} or {"prompt": ...}   a user's message
{"messages": [...]} or {"conversations": [...]}           a conversation, whose first user's message is taken
{"text": ...}                                             text to continue as it is
"""

import json
from dataclasses import dataclass
from pathlib import Path

from runtime.core.errors import RequestError
from runtime.core.messages import first_user_text

FIELDS = ("turns", "question", "prompt", "messages", "conversations", "text")


@dataclass(frozen=True)
class Prompt:
    """A prompt; one that is ``raw`` is not put into the chat template."""

    text: str
    raw: bool


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, of ``turns`` the first. Raises RequestError naming file and line."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"--prompts: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompts: {path} is not UTF-8 (byte {error.start})") from None
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
    if field == "turns":
        value = value[0] if isinstance(value, list) and value else None
    elif field in ("messages", "conversations"):
        value = first_user_text(value)
    if not isinstance(value, str):
        raise RequestError(f"{field} must hold text, got {json.dumps(row[field])[:60]}", field=where)
    if not value.strip():
        raise RequestError(f"{field} must not be empty", field=where)
    return Prompt(value, raw=field == "text")


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
