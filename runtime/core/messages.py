"""Chat messages in JSON, as data files, prompt files and requests hold them.

A message has a role and a content:

    {"role": "user", "content": "Hi"}      OpenAI
    {"from": "human", "value": "Hi"}       ShareGPT

The content is text, or a list of parts {"type": "text", "text": "Hi"}. In OpenAI's form there may also be
calls of tools, and messages of the role ``tool`` with what a tool has returned.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
