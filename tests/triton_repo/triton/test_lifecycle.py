"""Servers that are stopped, killed, started again, or given a model that fails."""

import shutil
import signal
import subprocess
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import GENERATE, PATIENCE, PROMPTS, Server, expected_text
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.server import write_repository
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
    def _submit(self, request, sender):
        super()._submit(request, Sender(sender))
"""


def write_tokens_model(bundle: Path, directory: Path) -> Path:
    """A second model repository, with the model of token ids only."""
    write_repository(directory, [TOKENS_MODEL], {"bundle": str(bundle), "num_threads": "1"})
    return directory


@pytest.fixture(scope="module")
def two_instances(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two processes for the text model, and a tokens model whose third response cannot be sent."""
    directory = tmp_path_factory.mktemp("instances")
    others = write_tokens_model(tiny_bundle_dir, directory / "others")
    (others / TOKENS_MODEL / "1" / "model.py").write_text(FAILING_MODEL)
    options = ["--num-instances", "2", f"--model-repository={others}"]
    running = Server(tiny_bundle_dir, directory / "log", *options)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def restarted(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that follows one killed during a request."""
    directory = tmp_path_factory.mktemp("restarted")
    killed = Server(tiny_bundle_dir, directory / "first")
    with grpc.InferenceServerClient(killed.url) as client:
        responses = stream(client, {"text_input": "x", "max_tokens": 500, "stream": True})
        next(responses)
        subprocess.run(["pkill", "-KILL", "-P", str(killed.process.pid)], check=True)
        with pytest.raises(InferenceServerException):
            list(responses)
    assert killed.process.wait(PATIENCE) != 0
    running = Server(tiny_bundle_dir, directory / "second")
    yield running
    assert running.stop() == 0


def test_a_restarted_server_serves_the_next_request(restarted: Server, decoder: SpeculativeDecoder) -> None:
    assert restarted.text(text_input="x") == expected_text(decoder, "x")


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


@pytest.mark.parametrize(
    ("name", "number"), [("restarted", signal.SIGTERM), ("two_instances", signal.SIGINT)]
)
def test_running_requests_end_before_the_server_does(
    request: pytest.FixtureRequest, decoder: SpeculativeDecoder, name: str, number: signal.Signals
) -> None:
    """The last test of both servers, since it stops them."""
    server: Server = request.getfixturevalue(name)
    text = server.text_after_signal(number, text_input="x", max_tokens=400)
    assert text == expected_text(decoder, "x", count=400)
    assert server.process.wait(PATIENCE) == 0


def test_a_damaged_engine_is_not_served(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    """The server's log says why, and other models are still served."""
    damaged = Path(shutil.copytree(tiny_bundle_dir, tmp_path / "damaged"))
    path = damaged / "backbone.onnx.data"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    others = write_tokens_model(tiny_bundle_dir, tmp_path / "others")
    server = Server(damaged, tmp_path / "log", f"--model-repository={others}")
    log = server.log.read_text()
    assert "sha256 differs" in log
    (line,) = [line for line in log.splitlines() if line.startswith(f"serve: {MODEL} did not load: ")]
    assert line.endswith("backbone.onnx.data is not the file of the bundle (sha256 differs)")
    assert not server.is_ready
    with pytest.raises(urllib.error.HTTPError):
        server.fetch(GENERATE, b'{"text_input": "x", "max_tokens": 4}')
    assert server.ask(input_ids=[5, 6], max_tokens=4)[-1]["num_output_tokens"] == [4]
    server.stop()
