"""A server with a certificate: who may speak to it, and what it tells a log and a collector of spans."""

import gzip
import json
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from runtime.core.errors import UserError
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import PATIENCE, Server, expected_text
from triton_repo import serve
from triton_repo.triton.server import OWN
from triton_repo.triton.tensors import MODEL
from triton_repo.web.request_log import REQUEST_ID, tracing

KEY, PROMPT = "a-key-that-nobody-knows", "How many secrets?"
FILES = ("certificate.pem", "key.pem")
SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a self-signed certificate and its key."""
    directory = tmp_path_factory.mktemp("certificate")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", *SUBJECT, "-out", FILES[0], "-keyout", FILES[1]]
    subprocess.run(command, cwd=directory, check=True, capture_output=True)
    return directory


class Collector(ThreadingHTTPServer):
    """Takes spans in OpenTelemetry's protocol."""

    def __init__(self) -> None:
        super().__init__(("localhost", 0), _Collect)
        self.services: set[str] = set()
        self.spans: list[Any] = []

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self.server_address[1]}/v1/traces"

    def span_of(self, request_id: str) -> tuple[Any, dict[str, Any]]:
        """A request's span, which comes after a while, and its attributes."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for span in list(self.spans):
                found = {each.key: each.value for each in span.attributes}
                if found["ctc.request_id"].string_value == request_id:
                    return span, found
            time.sleep(0.05)
        raise AssertionError(f"no span of {request_id}")


class _Collect(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services.update(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def secured(
    tiny_bundle_dir: Path,
    certificate: Path,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    options = ["--server", OWN, "--api-key", KEY, "--log-format", "json"]
    options += [f"--ssl-certfile={certificate / FILES[0]}", f"--ssl-keyfile={certificate / FILES[1]}"]
    options += [f"--otlp-traces-endpoint={collector.endpoint}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
        running = Server(tiny_bundle_dir, tmp_path_factory.mktemp("secured") / "log", *options)
    yield running
    assert running.stop() == 0
    assert lines(running)[-1]["message"] == "stopped"


@pytest.fixture(scope="module")
def trusting(certificate: Path) -> ssl.SSLContext:
    """What a client knows that trusts the certificate and no other."""
    return ssl.create_default_context(cafile=str(certificate / FILES[0]))


@pytest.fixture
def client(secured: Server, trusting: ssl.SSLContext) -> Iterator[openai.OpenAI]:
    url = f"https://localhost:{secured.openai_port}/v1"
    with openai.DefaultHttpxClient(verify=trusting, timeout=PATIENCE) as http:
        yield openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, http_client=http)


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.read_text().splitlines()]


def line_of(server: Server, request_id: str) -> dict[str, Any]:
    """The line of a request, which is written after its answer."""
    end = time.monotonic() + PATIENCE
    while not (found := [line for line in lines(server) if line.get("request_id") == request_id]):
        assert time.monotonic() < end
        time.sleep(0.02)
    (line,) = found
    return line


def test_only_who_trusts_the_certificate_is_answered(secured: Server, trusting: ssl.SSLContext) -> None:
    for port, path in (
        (secured.http_port, "/v2/health/ready"),
        (secured.metrics_port, "/metrics"),
        (secured.openai_port, "/health"),
    ):
        url = f"https://localhost:{port}{path}"
        with urllib.request.urlopen(url, context=trusting, timeout=PATIENCE) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(url, timeout=PATIENCE)
        with pytest.raises(OSError, match=r"closed|reset|BadStatus"):
            urllib.request.urlopen(url.replace("https", "http"), timeout=PATIENCE)
    assert not [line for line in lines(secured) if line.get("path") == "/metrics"]


def test_every_request_has_a_line(
    secured: Server, client: openai.OpenAI, decoder: SpeculativeDecoder
) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    options |= {"temperature": 0, "max_tokens": 24}
    raw = client.chat.completions.with_raw_response.create(**options, extra_headers={REQUEST_ID: "mine-1"})
    answer = raw.parse()
    assert raw.headers[REQUEST_ID] == "mine-1"
    assert answer.choices[0].message.content == expected_text(decoder, PROMPT)
    line = line_of(secured, "mine-1")
    assert line["event"] == "request"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert answer.usage is not None
    assert (line["prompt_tokens"], line["output_tokens"]) == (answer.usage.prompt_tokens, 24)
    assert (line["id"], line["reason"]) == (answer.id, "length")
    assert "time_to_first_token" not in line  # all tokens came together
    assert 1 <= line["acceptance_length"] <= 7

    streamed = client.chat.completions.create(
        **options, n=2, stream=True, extra_headers={REQUEST_ID: "mine-2"}
    )
    (identifier,) = {event.id for event in streamed}
    line = line_of(secured, "mine-2")
    assert (line["id"], line["output_tokens"], line["reason"]) == (identifier, 48, "length")
    assert 0 < line["time_to_first_token"] <= line["seconds"]

    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**options, "top_p": PROMPT})
    line = line_of(secured, wrong.value.response.headers[REQUEST_ID])
    assert (line["status"], line["reason"]) == (400, "invalid")
    assert "output_tokens" not in line

    left = {**options, "temperature": 9, "max_tokens": 450, "logit_bias": {"0": -10000}}
    with client.chat.completions.create(**left, stream=True, extra_headers={REQUEST_ID: "mine-3"}) as events:
        next(iter(events))
    line = line_of(secured, "mine-3")
    assert line["reason"] == "cancelled"
    assert 0 < line["output_tokens"] < 450

    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key=KEY[:-1]).models.list(extra_headers={REQUEST_ID: 'a"b'})
    *_, line = lines(secured)
    assert (line["status"], line["reason"], line["path"]) == (401, "invalid", "/v1/models")
    log = secured.log.read_text()
    for secret in (KEY, KEY[:-1], PROMPT, 'a\\"b'):
        assert secret not in log


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--ssl-certfile=absent.pem"],
            "--ssl-certfile: absent.pem must be PEM files of a certificate and its key",
        ),
        (["--ssl-keyfile=key.pem"], "--ssl-keyfile: needs --ssl-certfile"),
    ],
)
def test_unusable_certificates(
    options: list[str], message: str, tiny_bundle_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--bundle", str(tiny_bundle_dir), "--server", OWN, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"serve: {message}")


def test_every_request_has_a_span(client: openai.OpenAI, collector: Collector) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    headers = {REQUEST_ID: "span-1", "traceparent": parent}
    assert list(client.completions.create(**options, stream=True, extra_headers=headers))
    span, found = collector.span_of("span-1")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)
    assert span.name == "POST /v1/completions"
    assert found["http.response.status_code"].int_value == 200
    assert found["gen_ai.usage.output_tokens"].int_value == 24
    (reason,) = found["gen_ai.response.finish_reasons"].array_value.values
    assert reason.string_value == "length"
    (first,) = span.events
    assert (first.name, span.start_time_unix_nano < first.time_unix_nano) == ("first token", True)
    assert first.time_unix_nano <= span.end_time_unix_nano
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < PATIENCE

    with pytest.raises(openai.NotFoundError):
        client.completions.create(**{**options, "model": PROMPT}, extra_headers={REQUEST_ID: "span-2"})
    span, found = collector.span_of("span-2")
    assert found["http.response.status_code"].int_value == 404
    assert not span.parent_span_id
    assert collector.services == {"ctc-speculator"}
    assert PROMPT not in str(collector.spans)


def test_a_collector_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UserError, match="--otlp-traces-endpoint: must be an address such as"),
        tracing("x:4317"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with (
        pytest.raises(UserError, match=r"needs OpenTelemetry, .*ctc-speculator\[tracing\]"),
        tracing("http://x"),
    ):
        pass
