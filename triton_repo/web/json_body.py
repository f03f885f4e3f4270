"""The JSON body of a request, within limits that are checked before any parser sees it."""

import json
import re
from typing import Any

from aiohttp import web

from runtime.core.errors import RequestError

MAX_BODY_BYTES = 8 << 20
# Objects and lists in each other. A request needs five: the body, its messages, their parts, and options.
MAX_DEPTH = 64
# How much of a wrong value an error shows.
SHOWN = 60
STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
PAIR = re.compile(r"\[\]|{}")
NO_BRACKET = re.compile(r"[^\[\]{}]+")


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body, which has to be a JSON object.

    Raises RequestError, and ``HTTPRequestEntityTooLarge`` for more bytes than the application takes.
    """
    try:
        text = await request.text()
    except UnicodeDecodeError as error:
        raise RequestError(f"must be JSON: {error}", field="body") from error
    except (LookupError, web.RequestPayloadError) as error:
        message = "must be text in the charset and the encoding of its headers"
        raise RequestError(f"{message}: {shown(str(error))}", field="body") from error
    if is_deep(text):
        raise RequestError(
            f"must be JSON of at most {MAX_DEPTH} objects and lists in each other", field="body"
        )
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RequestError(f"must be JSON: {error}", field="body") from error
    if not isinstance(body, dict):
        raise RequestError("must be a JSON object", field="body")
    return body


def is_deep(text: str) -> bool:
    """Whether objects and lists stand in each other more than ``MAX_DEPTH`` deep, or so many are not closed.

    Every round takes the innermost pairs away, so the time is at most ``MAX_DEPTH`` passes over the text.
    Brackets in strings do not count: '[1, "[["]' has the depth 1.
    """
    brackets = NO_BRACKET.sub("", STRING.sub("", text))
    for _ in range(MAX_DEPTH):
        inner = brackets
        brackets = PAIR.sub("", inner)
        if brackets == inner:
            return len(brackets) > MAX_DEPTH
    return bool(brackets)


def shown(value: Any) -> str:
    """A wrong value as an error shows it."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
