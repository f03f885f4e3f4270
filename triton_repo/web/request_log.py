"""One line in the log, and a span, for every request of HTTP: what was asked, how long it took, how it ended.

Neither texts nor keys are logged, and no error's message, because it may show a part of a text.

Spans of OpenTelemetry are sent to a collector if one is named. A span has the fields of the request's line in
the log, under the names of OpenTelemetry's conventions for HTTP and generative models where these have one.
The header ``traceparent`` of a request makes its span a part of the client's trace.
Variables of OpenTelemetry's SDK, such as OTEL_SERVICE_NAME, are heeded.
"""

import asyncio
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from runtime.core.errors import UserError
from triton_repo.triton.log import write
from triton_repo.triton.tensors import CANCELLED, INTERNAL, INVALID, UNAVAILABLE
from triton_repo.web.access import Handler

OPTION = "--otlp-traces-endpoint"
SERVICE_NAME = "ctc-speculator"
# Variables of the SDK that name the service.
NAMED_BY = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")
# For a message to the collector. One that is not there delays the end of the server by that.
EXPORT_SECONDS = 2
# What the fields of a request's line in the log are called in its span.
ATTRIBUTES = {
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "time_to_first_token": "gen_ai.latency.time_to_first_token",
    "reason": "gen_ai.response.finish_reasons",
    "request_id": "ctc.request_id",
    "acceptance_length": "ctc.acceptance_length",
}
FIRST_TOKEN = "first token"


# Of this process; without one outside of ``tracing``.
_TRACER: ContextVar[Any] = ContextVar("tracer", default=None)


@contextmanager
def tracing(endpoint: str | None) -> Iterator[None]:
    """Send the spans of requests that end inside the block. endpoint: of OTLP over HTTP; None sends nothing

    Raises UserError for an address that is none of HTTP, and without OpenTelemetry's packages.
    """
    if endpoint is None:
        yield
        return
    if not endpoint.startswith(("http://", "https://")):
        expected = "an address such as http://localhost:4318/v1/traces"
        raise UserError(f"must be {expected}, got {endpoint!r}", field=OPTION)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        problem = 'needs OpenTelemetry, which is not installed: pip install "ctc-speculator[tracing]"'
        raise UserError(problem, field=OPTION) from None
    is_named = any(name in os.environ for name in NAMED_BY)
    provider = TracerProvider(resource=Resource.create({} if is_named else {"service.name": SERVICE_NAME}))
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_SECONDS))
    )
    token = _TRACER.set(provider.get_tracer("triton_repo"))
    try:
        yield
    finally:
        _TRACER.reset(token)
        provider.shutdown()


def trace(request: web.Request, fields: Mapping[str, Any]) -> None:
    """Make the span of a request that ends now. fields: those of its line in the log"""
    tracer = _TRACER.get()
    if tracer is None:
        return
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end = time.time_ns()
    begin = end - int(fields["seconds"] * 1e9)
    resource = request.match_info.route.resource
    name = f"{request.method} {resource.canonical}" if resource else request.method
    attributes = {ATTRIBUTES[key]: value for key, value in fields.items() if key in ATTRIBUTES}
    if "reason" in fields:
        attributes[ATTRIBUTES["reason"]] = [fields["reason"]]
    parent = TraceContextTextMapPropagator().extract(request.headers)
    span = tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=begin)
    if "time_to_first_token" in fields:
        span.add_event(FIRST_TOKEN, timestamp=begin + int(fields["time_to_first_token"] * 1e9))
    if fields["status"] >= 500:
        span.set_status(StatusCode.ERROR)
    span.end(end)


REQUEST_ID = "X-Request-Id"
SANE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
# Whoever watches the server asks these addresses all the time. Only their failures have a line.
WATCHED = re.compile(r"/metrics|/health|/ready|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/1)?/ready")
CLIENT_LEFT = 499


@dataclass
class RequestRecord:
    """What is known of a request so far.

    request_id: the client's header X-Request-Id, or a new one; identifier: what the answer calls it
    began, first: ``time.monotonic`` seconds, of the request and of its first token; None for a first token
        that came with others
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
        names = ("num_input_tokens", "num_cached_tokens", "num_output_tokens", "num_steps")
        self.last[index] = tuple(int(tensors[name][0]) for name in names)
        # The first token comes before any step; a whole text comes after all of them.
        if self.first is None and self.last[index][-1] == 0:
            self.first = time.monotonic()
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
        if self.last:
            prompts, cached, outputs, steps = (
                sum(counts) for counts in zip(*self.last.values(), strict=True)
            )
            found |= {"prompt_tokens": prompts, "cached_tokens": cached, "output_tokens": outputs}
            if self.first is not None:
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
        if status >= 400 and status != CLIENT_LEFT:  # whatever choices had ended before
            record.fail(status)
        if status >= 400 or not WATCHED.fullmatch(request.rel_url.raw_path):
            fields = record.fields(request, status)
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            write(f"request: {text}", {"event": "request", **fields})
            trace(request, fields)
