"""Servers that are stopped or killed, or given a model that fails."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import (
    GENERATE,
    GENERATE_STREAM,
    PATIENCE,
    PROMPTS,
    KeptServer,
    Server,
    damaged_bundle,
    expected_text,
)
from triton_repo.triton.guard import HEARTBEAT, MAX_SOCKET_PATH, PREFIX, own_directory
from triton_repo.triton.process import free_ports
from triton_repo.triton.server import DRAIN_SECONDS, PORTS, ROOT, write_repository
from triton_repo.triton.tensors import MODEL, TOKENS_MODEL

FAILING_MODEL = """
from triton_repo.triton import backend


class Sender:
    # Has no room for the third response.

    def __init__(self, sender):
        self.sender, self.count = sender, 0
        self.is_cancelled = sender.is_cancelled

    def send(self, *args, **options):
        self.count += 1
        if self.count == 3:
            raise MemoryError("no room")
        self.sender.send(*args, **options)


class TritonPythonModel(backend.TritonPythonModel):
    def _sender(self, request):
        return backend.TritonSender(Sender(request.get_response_sender()))
"""


def write_tokens_model(bundle: Path, directory: Path) -> Path:
    """A second model repository, with the model of token ids only."""
    write_repository(directory, [TOKENS_MODEL], {"bundle": str(bundle), "num_threads": "1"})
    return directory


@pytest.fixture(scope="module")
def kept_server(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptServer]:
    def start() -> Server:
        directory = tmp_path_factory.mktemp("instances")
        others = write_tokens_model(tiny_bundle_dir, directory / "others")
        (others / TOKENS_MODEL / "1" / "model.py").write_text(FAILING_MODEL)
        options = ["--num-instances", "2", f"--model-repository={others}"]
        return Server(tiny_bundle_dir, directory / "log", *options)

    kept = KeptServer(start)
    yield kept
    kept.stop()


@pytest.fixture
def two_instances(kept_server: KeptServer) -> Server:
    """Two processes for the text model, and a tokens model whose third response cannot be sent."""
    return kept_server.running()


def test_two_instances_give_the_same_texts(two_instances: Server, decoder: SpeculativeDecoder) -> None:
    before = two_instances.counter("ctc_requests")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda text: two_instances.text(text_input=text), PROMPTS))
    assert texts == [expected_text(decoder, text) for text in PROMPTS]
    # Triton gives the requests to both in turns, and both add to the same counter.
    assert two_instances.counter("ctc_requests") - before == len(PROMPTS)


def test_an_answer_that_cannot_be_sent_ends_with_an_error(
    two_instances: Server, decoder: SpeculativeDecoder
) -> None:
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="the answer cannot be sent: MemoryError"):
            two_instances.ask(input_ids=[5, 6], max_tokens=100)
    assert two_instances.text(text_input="x") == expected_text(decoder, "x")


def test_running_requests_end_before_the_server_does(
    two_instances: Server, decoder: SpeculativeDecoder
) -> None:
    """Connections without a request do not delay the end of the server."""
    expected = expected_text(decoder, "x", count=400)
    fields = {"model": MODEL, "prompt": "x", "text_input": "x", "max_tokens": 400, "stream": True}
    fields |= {"temperature": 0}
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("localhost", port)))
            for port in (two_instances.http_port, two_instances.openai_port, two_instances.grpc_port)
        ]
        idle[0].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle[0].recv(15) == b"HTTP/1.1 200 OK"
        texts = []
        for address, name in (
            (f"{two_instances.http_port}/v2/{GENERATE_STREAM}", "text_output"),
            (f"{two_instances.openai_port}/stream", "text"),
        ):
            request = urllib.request.Request(f"http://localhost:{address}", json.dumps(fields).encode())
            request.add_header("Content-Type", "application/json")
            answer = stack.enter_context(urllib.request.urlopen(request, timeout=PATIENCE))
            texts.append((answer, name, answer.readline()))
        assert two_instances.text_after_signal(signal.SIGINT, text_input="x", max_tokens=400) == expected
        for answer, name, first in texts:
            events = [json.loads(line[6:]) for line in (first, *answer) if line.startswith(b"data: ")]
            assert "".join(event[name] for event in events) == expected
        assert two_instances.process.wait(DRAIN_SECONDS / 2) == 0
    lines = [line for line in two_instances.log.read_text().splitlines() if line.startswith("serve: ")]
    assert lines == [
        "serve: stopping: the running requests have 30 seconds to end, and no more are taken",
        "serve: stopped",
    ]


def test_sigterm_before_the_server_is_ready(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    ports = [f"--{name}-port={number}" for name, number in zip(PORTS, free_ports(4), strict=True)]
    command = [sys.executable, "-m", "triton_repo.serve", "--bundle", str(tiny_bundle_dir), *ports]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # of tritonserver
        process.send_signal(signal.SIGTERM)
        *_, last = process.stderr
        assert process.wait() == 0
    # Tritonserver may have been killed in the middle of a line.
    assert last.endswith("serve: stopped before the models were ready\n")


def test_a_damaged_engine_is_not_served(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    """The server's log says why, and other models are still served."""
    others = write_tokens_model(tiny_bundle_dir, tmp_path / "others")
    server = Server(
        damaged_bundle(tiny_bundle_dir, tmp_path), tmp_path / "log", f"--model-repository={others}"
    )
    try:
        log = server.log.read_text()
        (line,) = [line for line in log.splitlines() if line.startswith(f"serve: {MODEL} did not load: ")]
        assert line.endswith("backbone.onnx.data is not the file of the bundle (sha256 differs)")
        assert not server.is_ready
        for path in (GENERATE, "health/ready", f"models/{MODEL}/ready"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                server.fetch(path, b'{"text_input": "x"}' if path == GENERATE else None)
            assert caught.value.code == 503
            assert "sha256 differs" in caught.value.read().decode()
        assert server.ask(input_ids=[5, 6], max_tokens=4)[-1]["num_output_tokens"] == [4]
    finally:
        status = server.stop()
    assert status == 0


def test_a_directory_that_nobody_uses_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The path of pytest's own directory is too long for a socket.
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setattr(tempfile, "tempdir", base)
        stale, foreign = Path(base) / f"{PREFIX}1", Path(base) / f"{PREFIX}2"
        for directory in (stale, foreign):
            directory.mkdir()
        (stale / "lock").touch()
        with own_directory() as first, own_directory() as second:
            assert not stale.exists()
            assert {first, second, foreign} == set(Path(base).iterdir())
        assert {foreign} == set(Path(base).iterdir())


def test_a_directory_whose_path_is_too_long_for_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is just short enough has room for the socket."""
    longest = MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/{HEARTBEAT}")
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        short = Path(base) / ("a" * (longest - len(base) - 1))
        for path in (short, short.with_name(short.name + "a")):
            path.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(short))
        with own_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / HEARTBEAT))
        monkeypatch.setattr(tempfile, "tempdir", f"{short}a")
        with pytest.raises(UserError, match=f"^TMPDIR: must be a path of at most {longest} bytes, .*aa$"):
            own_directory().__enter__()
