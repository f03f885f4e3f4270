"""JSON that is nested too deeply or too large, at every address of a server: refused, and it lives."""

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import PATIENCE, Server, expected_text
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL

LISTS = "[" * 50_000 + "]" * 50_000
OBJECTS = '{"a":' * 50_000 + "1" + "}" * 50_000
LARGE = 50 << 20
MODEL_PATHS = [
    f"/v2/models/{model}{version}/{name}"
    for model in (MODEL, PLAIN_MODEL)
    for version in ("", "/versions/1")
    for name in ("generate", "generate_stream")
]
OPENAI_PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
# Addresses that take no body.
OTHERS = ["/v2", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/infer", "/v1/models", "/metrics"]


def bodies() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Names, bodies and further headers."""
    yield "lists", LISTS.encode(), {}
    yield "objects", OBJECTS.encode(), {}
    yield "open lists", b"[" * 100_000, {}
    yield "a nested field", b'{"model": "x", "text_input": ' + LISTS.encode() + b"}", {}
    yield "a nested field that nobody knows", b'{"text_input": "x", "x": ' + OBJECTS.encode() + b"}", {}
    yield "8 MiB of lists", b"[" * (8 << 20), {}
    yield "50 MB of lists", b"[" * LARGE, {}
    yield "50 MB of text", b'{"text_input": "' + b"a" * LARGE + b'"}', {}
    yield "50 MB in 50 kB", gzip.compress(b"[" * LARGE, 1), {"Content-Encoding": "gzip"}
    yield "a large number", b'{"text_input": "x", "seed": 1' + b"0" * 100_000 + b"}", {}
    yield "no JSON", b"\xff\xfe[", {}
    lone = b'"\\ud800"'
    prompts = b'"prompt": %s, "input": %s, "messages": [{"role": "user", "content": %s}]' % ((lone,) * 3)
    yield "a lone surrogate", b'{"model": "ctc_llm", "text_input": %s, %s}' % (lone, prompts), {}
    for encoding in ("gzip", "deflate", "br", "zstd", "x"):
        yield f"no {encoding}", b'{"text_input": "x"}', {"Content-Encoding": encoding}


def post(port: int, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """The status and the answer."""
    connection = http.client.HTTPConnection("localhost", port, timeout=PATIENCE)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("body", "headers"), [pytest.param(body, headers, id=name) for name, body, headers in bodies()]
)
def test_a_hostile_body_is_refused(server: Server, body: bytes, headers: dict[str, str]) -> None:
    large = len(body) == LARGE or ("text_input" in str(body[:20]) and len(body) > LARGE)
    addresses = [(server.http_port, path) for path in MODEL_PATHS]
    addresses += [(server.openai_port, path) for path in OPENAI_PATHS]
    for port, path in addresses:
        status, answer = post(port, path, body, headers)
        assert status == (415 if headers else 413 if large else 400), (path, answer[:200])
        error = json.loads(answer)["error"]
        assert isinstance(error, dict) == (port == server.openai_port)
        assert len(answer) < 500
    for port in (server.http_port, server.openai_port, server.metrics_port):
        for path in OTHERS:
            status, answer = post(port, path, body, headers)
            assert status in (404, 405), (path, answer[:200])
    assert_it_lives(server)


@pytest.mark.parametrize("nested", [LISTS, OBJECTS, "[" * (4 << 20)])
@pytest.mark.parametrize("field", ["messages", "template_options", "logit_bias"])
def test_hostile_json_in_a_text(server: Server, decoder: SpeculativeDecoder, field: str, nested: str) -> None:
    """Fields of Triton's models that hold JSON as a text, which the model parses, over gRPC and HTTP."""
    prompt: dict[str, Any] = {"messages": '[{"role": "user", "content": "x"}]'}
    if field == "logit_bias":
        prompt = {"text_input": "x"}
    fields = {**prompt, field: nested}
    with pytest.raises(InferenceServerException, match=f"{field}: must be"):
        server.ask(**fields)
    body = json.dumps(fields).encode()
    status, answer = post(server.http_port, MODEL_PATHS[0], body, {})
    assert (status, f"{field}: must be" in str(answer)) == (400, True)
    assert server.text(text_input="x") == expected_text(decoder, "x")
    assert_it_lives(server)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "text/plain; charset=utf-8", "multipart/form-data", None]
)
def test_a_body_has_to_be_declared_as_json(server: Server, content_type: str | None) -> None:
    """A page of another site may send a text without a question before, but not JSON."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "text_input": "x",
    }
    for port, path in ((server.http_port, MODEL_PATHS[0]), (server.openai_port, OPENAI_PATHS[0])):
        connection = http.client.HTTPConnection("localhost", port, timeout=PATIENCE)
        headers = {} if content_type is None else {"Content-Type": content_type}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        assert answer.status == 415
        assert b"Content-Type: must be application/json, got" in answer.read()
        connection.close()


def test_large_tensors(server: Server, decoder: SpeculativeDecoder) -> None:
    """Over gRPC, which has no limit of its own."""
    for options in (
        {"messages": "[" * LARGE},
        {"text_input": "a" * LARGE},
        {"input_ids": [1] * (2 << 20)},
    ):
        with pytest.raises(InferenceServerException, match=f"{next(iter(options))}: must .* at most"):
            server.ask(**options)
    assert server.text(text_input="x") == expected_text(decoder, "x")
    assert_it_lives(server)


@pytest.mark.parametrize(
    "request_",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",  # the beginning of TLS
        b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n{",
    ],
)
def test_what_is_no_http(server: Server, request_: bytes) -> None:
    for port in (server.http_port, server.openai_port, server.metrics_port):
        with socket.create_connection(("localhost", port), PATIENCE) as connection:
            connection.sendall(request_)
            assert connection.recv(1000).startswith(b"HTTP/1.0 400 ")
    assert_it_lives(server)


def assert_it_lives(server: Server) -> None:
    assert server.process.poll() is None
    for path in ("health/live", "health/ready", f"models/{MODEL}/ready"):
        server.fetch(path)
    log = server.log.read_text()
    assert "the server is started anew" not in log
    assert "Traceback" not in log
