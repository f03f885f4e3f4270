"""One line in the log, and a span, for every request of HTTP: what was asked, how long it took, how it ended.

Neither texts nor keys are logged, and no error's message, because it may show a part of a text.
"""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from triton_repo.triton.log import write
from triton_repo.triton.tensors import CANCELLED, INTERNAL, INVALID, UNAVAILABLE
from triton_repo.web.access import Handler
from triton_repo.web.tracing import trace

REQUEST_ID = "X-Request-Id"
SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Whoever watches the server asks these addresses all the time. Only their failures have a line.
WATCHED = re.compile(r"/metrics|/health|/ready|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/1)?/ready")
CLIENT_LEFT = 499


@dataclass
class RequestRecord:
    """What is known of a request so far.

    request_id: the client's header X-Request-Id, or a new one; identifier: what the answer calls it
    began, first: ``time.monotonic`` seconds, of the request and of its first token
    last: the counts of the last response of every choice: tokens of the prompt, those of it that had been
        kept, tokens of the output, and steps
    reason: why it ended, as the metrics count it; None while nobody has said
    """

    request_id: str
    identifier: str | None = None
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: dict[int, tuple[int, ...]] = field(default_factory=dict)
    reason: str | None = None

    def add(self, tensors: Mapping[str, Any], index: int = 0) -> None:
        """Take a response of the model. index: of the choice"""
        if self.first is None:
            self.first = time.monotonic()
        names = ("num_input_tokens", "num_cached_tokens", "num_output_tokens", "num_steps")
        self.last[index] = tuple(int(tensors[name][0]) for name in names)
        self.reason = tensors["finish_reason"][0].decode() or self.reason

    def fail(self, status: int) -> None:
        """The request ended with an error, perhaps after its first events."""
        self.reason = INVALID if status < 500 else UNAVAILABLE if status == 503 else INTERNAL

    def fields(self, request: web.Request, status: int) -> dict[str, Any]:
        """The line's fields. Times are seconds; the acceptance is in tokens a step."""
        found: dict[str, Any] = {
            "request_id": self.request_id,
            "method": request.method,
            "path": request.rel_url.raw_path,
            "status": status,
            "seconds": round(time.monotonic() - self.began, 4),
        }
        if self.identifier is not None:
            found["id"] = self.identifier
        if self.last and self.first is not None:
            prompts, cached, outputs, steps = (
                sum(counts) for counts in zip(*self.last.values(), strict=True)
            )
            found |= {"prompt_tokens": prompts, "cached_tokens": cached, "output_tokens": outputs}
            found["time_to_first_token"] = round(self.first - self.began, 4)
            if steps:
                found["acceptance_length"] = round((outputs - len(self.last)) / steps, 3)
        if self.reason is not None:
            found["reason"] = self.reason
        return found


RECORD = web.RequestKey("record", RequestRecord)


def log_requests(app: web.Application) -> None:
    """Let an application log its requests, and name each in its answer's header."""
    app.middlewares.insert(0, _log)
    app.on_response_prepare.append(_name)


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    if RECORD in request:
        response.headers[REQUEST_ID] = request[RECORD].request_id


@web.middleware
async def _log(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(REQUEST_ID, "")
    record = RequestRecord(given if SANE_ID.fullmatch(given) else uuid.uuid4().hex)
    request[RECORD] = record
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    except asyncio.CancelledError:
        status, record.reason = CLIENT_LEFT, CANCELLED
        raise
    finally:
        if status >= 400 and record.reason is None:
            record.fail(status)
        if status >= 400 or not WATCHED.fullmatch(request.rel_url.raw_path):
            fields = record.fields(request, status)
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            write(f"request: {text}", {"event": "request", **fields})
            trace(request, fields)
