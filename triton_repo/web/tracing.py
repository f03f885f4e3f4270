"""Spans of OpenTelemetry for the requests of HTTP, sent to a collector if one is named.

A span has what the request's line in the log has, under the names of OpenTelemetry's conventions for HTTP
and generative models where these have one, and none of its texts. The header ``traceparent`` of a request
makes its span a part of the client's trace. Variables of OpenTelemetry's SDK, such as OTEL_SERVICE_NAME, are
heeded.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from runtime.core.errors import UserError

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


class _Tracer:
    """The tracer of this process; None outside of ``tracing``."""

    current: Any = None


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
    _Tracer.current = provider.get_tracer("triton_repo")
    try:
        yield
    finally:
        _Tracer.current = None
        provider.shutdown()


def trace(request: web.Request, fields: Mapping[str, Any]) -> None:
    """Make the span of a request that ends now. fields: those of its line in the log"""
    tracer = _Tracer.current
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
