"""The JSON body of a request, within limits that are checked before any parser sees it."""

import codecs
import json
import math
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
import numpy as np
from aiohttp import web

from runtime.core.errors import RequestError, UserError

MAX_BODY_BYTES = 8 << 20
# Objects and lists in each other. A request needs five: the body, its messages, their parts, and options.
MAX_DEPTH = 64
# How much of a wrong value an error shows.
SHOWN = 60
STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class MediaTypeError(UserError):
    """A body that is not declared as JSON in UTF-8, or is compressed."""

    status = 415


async def read_json(request: web.Request, also: Collection[str] = ()) -> dict[str, Any]:
    """The body, which has to be a JSON object.

    also: types of content that count as JSON too
    Raises RequestError and MediaTypeError, and ``HTTPRequestEntityTooLarge`` for more bytes than the
    application takes.
    """
    _check_type(request, also)
    most, size = request.client_max_size, request.content_length or 0
    if size > most:  # none of it is read
        raise web.HTTPRequestEntityTooLarge(most, size)
    try:
        text = (await request.read()).decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise RequestError(f"must be JSON: {error}", field="body") from error
    except web.RequestPayloadError as error:
        raise RequestError(f"cannot be read: {shown(str(error))}", field="body") from error
    if depth(text) > MAX_DEPTH:
        message = f"must be JSON of at most {MAX_DEPTH} objects and lists in each other"
        raise RequestError(message, field="body")
    try:
        body = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError as error:
        problem = str(error).partition("; use sys.")[0]  # of a number with too many digits
        raise RequestError(f"must be JSON: {problem}", field="body") from error
    if not isinstance(body, dict):
        raise RequestError("must be a JSON object", field="body")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    """A number, which an answer may have to repeat."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shown(text)} is too large")
    return value


def _check_type(request: web.Request, also: Collection[str]) -> None:
    """Raises MediaTypeError unless the body is declared as JSON in UTF-8, or nothing is said of its charset.

    Bodies are not decompressed: a small one may become a large one.

    A page of another origin may send a text without asking the server first, but no JSON.
    """
    kind, charset = request.content_type, request.charset or "utf-8"
    if kind != "application/json" and not kind.endswith("+json") and kind not in also:
        raise MediaTypeError(
            f"must be application/json, got {shown(request.headers.get('Content-Type'))}",
            field="Content-Type",
        )
    try:
        name = codecs.lookup(charset).name
    except (LookupError, ValueError):  # ValueError: a name with a zero byte
        name = charset
    if name not in ("utf-8", "ascii"):
        raise MediaTypeError(f"must have the charset utf-8, got {shown(charset)}", field="Content-Type")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise MediaTypeError(f"must be absent, got {shown(encoding)}", field="Content-Encoding")


def depth(text: str) -> int:
    """How many objects and lists of a JSON text stand in each other, in linear time.

    Brackets in strings do not count: '[1, "[["]' has the depth 1.
    """
    characters = np.frombuffer(STRING.sub("", text).encode(), np.uint8)
    opened = (characters == ord("[")) | (characters == ord("{"))
    closed = (characters == ord("]")) | (characters == ord("}"))
    steps = opened.astype(np.int8) - closed.astype(np.int8)
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


class Kind(NamedTuple):
    """What a value of a body has to be: a type that msgspec knows, and the same in words."""

    type: Any
    words: str

    def read(self, field: str, value: Any) -> Any:
        """The value. Raises RequestError that names the field."""
        try:
            return msgspec.convert(value, self.type)
        # msgspec encodes a text that is no value of the type, which a lone surrogate does not let it do.
        except (msgspec.ValidationError, UnicodeEncodeError):
            raise RequestError(f"must be {self.words}, got {shown(value)}", field=field) from None


BOOL, TEXT = Kind(bool, "true or false"), Kind(str, "text")


def shown(value: Any) -> str:
    """A wrong value as an error shows it."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
