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
from tests.triton_repo.servers import GENERATE, GENERATE_STREAM, PATIENCE, RESTARTED, Server, expected_text
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.tensors import MODEL

# Seconds until every stream has ended, and until the server says everywhere that it is not ready.
STREAM_SECONDS, READY_SECONDS = 10, 5
# With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
LONG: dict[str, Any] = {
    "text_input": "x",
    "max_tokens": 500,
    "stream": True,
    "end_id": -1,
    "temperature": 9.0,
}


@pytest.fixture(scope="module")
def supervised(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a bundle of its own."""
    directory = tmp_path_factory.mktemp("supervised")
    running = Server(Path(shutil.copytree(tiny_bundle_dir, directory / "bundle")), directory / "log")
    yield running
    assert running.stop() == 0


def model_process(server: Server) -> psutil.Process:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [process for process in processes if "stub" in process.name()]
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

    def reasons(self, seconds: float) -> list[str]:
        """Why the last text of each was not answered, which has to be known within this time."""
        end = time.monotonic() + seconds
        return [reason.result(max(end - time.monotonic(), 0)) for reason in self._reasons]

    def _ask(self, ask: Callable[[Server], Iterator[str]], server: Server) -> str:
        try:
            while True:
                for _ in ask(server):
                    self._begun.add(ask)
                    if self._stop.is_set():
                        return "the test has ended"
        except (RuntimeError, InferenceServerException, openai.APIError) as error:
            return str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_model_process_that_dies_or_hangs(
    supervised: Server, decoder: SpeculativeDecoder, number: signal.Signals
) -> None:
    process, restarts = model_process(supervised), supervised.log.read_text().count(RESTARTED)
    assert readiness(supervised) == {True}
    # Until its weights are back, no new process can load them.
    weights = supervised.log.parent / "bundle" / "backbone.onnx.data"
    aside = weights.rename(weights.with_suffix(".aside"))
    weights.touch()
    with Load(supervised) as load:
        process.send_signal(number)
        failed = time.monotonic()
        while readiness(supervised) != {False}:
            assert time.monotonic() - failed < READY_SECONDS
            time.sleep(0.05)
        assert status_of(f"http://localhost:{supervised.http_port}/v2/health/live") == 200
        texts = load.reasons(failed + STREAM_SECONDS - time.monotonic())
    assert "UNAVAILABLE" in texts[0]
    happened = "has ended" if number == signal.SIGKILL else "hangs: no heartbeat for"
    for text in texts[1:]:
        assert f"the process {process.pid} of {MODEL} {happened}" in text
    with pytest.raises(urllib.error.HTTPError) as caught:
        supervised.fetch(GENERATE, b'{"text_input": "x"}')
    assert (caught.value.code, caught.value.headers["Retry-After"]) == (503, "2")
    supervised.wait_for("backbone.onnx.data must have", restarts + 1)
    aside.rename(weights)
    supervised.wait_for(RESTARTED, restarts + 1)
    assert readiness(supervised) == {True}
    assert model_process(supervised).pid != process.pid
    assert supervised.text(text_input="x") == expected_text(decoder, "x")
