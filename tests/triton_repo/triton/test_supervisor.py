"""Model processes that die or hang under load: streams end with a reason, and the server serves again."""

import json
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import (
    GENERATE,
    GENERATE_STREAM,
    PATIENCE,
    RESTARTED,
    Server,
    assert_nothing_is_left_by,
    expected_text,
)
from triton_repo.triton.choice import OWN, TRITON
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.tensors import MODEL

# With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
LONG: dict[str, Any] = {
    "text_input": "x",
    "max_tokens": 500,
    "stream": True,
    "end_id": -1,
    "temperature": 9.0,
}


@pytest.fixture(scope="module")
def supervised(
    request: pytest.FixtureRequest, tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with a bundle of its own. The tests name it: Triton, or ours."""
    directory = tmp_path_factory.mktemp("supervised")
    bundle = Path(shutil.copytree(tiny_bundle_dir, directory / "bundle"))
    running = Server(bundle, directory / "log", "--server", request.param)
    yield running
    running.process.kill()


def model_process(server: Server) -> psutil.Process:
    """The process with the model: Triton's stub, or our worker."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [
        process
        for process in processes
        if "stub" in process.name() or process.cmdline()[1:3] == ["-m", "triton_repo.worker"]
    ]
    return found


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def is_ready_over_grpc(server: Server) -> bool:
    try:
        with grpc.InferenceServerClient(server.url) as client:
            return bool(client.is_server_ready() and client.is_model_ready(MODEL))
    except InferenceServerException:
        return False


def readiness(server: Server) -> set[bool]:
    """What every interface says of it."""
    triton, openai_url = f"http://localhost:{server.http_port}/v2", f"http://localhost:{server.openai_port}"
    urls = [f"{triton}/health/ready", f"{triton}/models/{MODEL}/ready"]
    urls += [f"{openai_url}/health", f"{openai_url}/ready"]
    return {status_of(url) == 200 for url in urls} | {is_ready_over_grpc(server)}


def over_grpc(server: Server) -> Iterator[str]:
    with grpc.InferenceServerClient(server.url) as client:
        for response in stream(client, LONG):
            yield response["text_output"][0].decode()


def over_http(server: Server) -> Iterator[str]:
    url = f"http://localhost:{server.http_port}/v2/{GENERATE_STREAM}"
    try:
        with urllib.request.urlopen(url, json.dumps(LONG).encode(), timeout=PATIENCE) as answer:
            for line in filter(bytes.strip, answer):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                yield event["text_output"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error


def over_openai(server: Server) -> Iterator[str]:
    url = f"http://localhost:{server.openai_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        message: Any = {"role": "user", "content": "x"}
        options: dict[str, Any] = {"max_tokens": 450, "temperature": 9, "logit_bias": {"0": -10000}}
        for event in client.chat.completions.create(model=MODEL, messages=[message], stream=True, **options):
            yield event.choices[0].delta.content or ""


INTERFACES = (over_grpc, over_http, over_openai)


class Load:
    """Clients of every interface in threads, each with one text after the other until one is not answered."""

    def __init__(self, server: Server):
        self._pool = ThreadPoolExecutor(len(INTERFACES))
        self._begun: set[Any] = set()
        self._stop = threading.Event()
        self._reasons = [self._pool.submit(self._ask, ask, server) for ask in INTERFACES]

    def __enter__(self) -> "Load":
        """Wait until every client receives a text."""
        while len(self._begun) < len(INTERFACES):
            failed = [reason.result() for reason in self._reasons if reason.done()]
            if failed:
                self._stop.set()
                pytest.fail(f"a request failed before anything happened: {failed}")
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def reasons(self) -> list[str]:
        """Why the last text of each was not answered; waits until all have ended."""
        return [reason.result(PATIENCE) for reason in self._reasons]

    def _ask(self, ask: Callable[[Server], Iterator[str]], server: Server) -> str:
        try:
            while True:
                for _ in ask(server):
                    self._begun.add(ask)
                    if self._stop.is_set():
                        return "the test has ended"
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def wait_until_not_ready(server: Server) -> None:
    """Wait until every interface says so."""
    end = time.monotonic() + PATIENCE
    while readiness(server) != {False}:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("supervised", "number"),
    [(TRITON, signal.SIGKILL), (TRITON, signal.SIGSTOP), (TRITON, signal.SIGBUS), (OWN, signal.SIGKILL)],
    indirect=["supervised"],
)
def test_a_model_process_that_dies_or_hangs(
    supervised: Server, decoder: SpeculativeDecoder, number: signal.Signals
) -> None:
    """SIGBUS comes from the bundle itself: a file is emptied from which the process reads its weights."""
    process, restarts = model_process(supervised), supervised.log.read_text().count(RESTARTED)
    assert readiness(supervised) == {True}
    weights = supervised.log.parent / "bundle" / "backbone.onnx.data"
    content = weights.read_bytes()
    with Load(supervised) as load:
        # Until its weights are back, no new process can load them.
        if number != signal.SIGBUS:
            weights.unlink()
        weights.write_bytes(b"")
        if number != signal.SIGBUS:
            process.send_signal(number)
        wait_until_not_ready(supervised)
        assert status_of(f"http://localhost:{supervised.http_port}/v2/health/live") == 200
        texts = load.reasons()
    assert "UNAVAILABLE" in texts[0]
    happened = "hangs: no heartbeat for" if number == signal.SIGSTOP else "has ended"
    for text in texts[1:]:
        assert f"the process {process.pid} of {MODEL} {happened}" in text
    for fetch, body in (
        (supervised.fetch, b'{"text_input": "x"}'),
        (lambda path, body: ask_openai(supervised, body), b'{"model": "ctc_llm", "prompt": "x"}'),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            fetch(GENERATE, body)
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (503, "2")
    supervised.wait_for("backbone.onnx.data must have", restarts + 1)
    weights.write_bytes(content)
    supervised.wait_for(RESTARTED, restarts + 1)
    assert readiness(supervised) == {True}
    assert model_process(supervised).pid != process.pid
    assert supervised.text(text_input="x") == expected_text(decoder, "x")


def ask_openai(server: Server, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://localhost:{server.openai_port}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("supervised", [TRITON], indirect=True)
def test_a_tritonserver_that_hangs(supervised: Server, decoder: SpeculativeDecoder) -> None:
    restarts = supervised.log.read_text().count(RESTARTED)
    with Load(supervised) as load:
        process = model_process(supervised).parent()
        assert process is not None
        process.suspend()
        wait_until_not_ready(supervised)
        assert all(load.reasons())
    supervised.wait_for(RESTARTED, restarts + 1)
    assert "serve: tritonserver does not answer: " in supervised.log.read_text()
    assert supervised.text(text_input="x") == expected_text(decoder, "x")


@pytest.mark.parametrize("supervised", [TRITON, OWN], indirect=True)
def test_sigkill_of_the_launcher_leaves_nothing(supervised: Server) -> None:
    """The last test of this server. Its clients hear of it at once."""
    with Load(supervised) as load:
        assert_nothing_is_left_by(supervised, supervised.process.kill)
        assert all(load.reasons())
