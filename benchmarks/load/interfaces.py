"""Clients of every interface of a server, who ask for long texts without pause, and whether it is ready."""

import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import openai
import psutil
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.process import ServerProcess
from triton_repo.triton.tensors import MODEL

# Seconds until a request or a process counts as hanging, and until a client asks again.
PATIENCE, PAUSE = 120.0, 0.2
# With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
LONG: dict[str, Any] = {
    "text_input": "x",
    "max_tokens": 500,
    "stream": True,
    "end_id": -1,
    "temperature": 9.0,
}


class CutOffError(Exception):
    """A stream has ended, and has said neither that the text is whole nor what went wrong."""


def over_grpc(server: ServerProcess) -> Iterator[str]:
    """The parts of a long text. Raises CutOffError, and other errors with the server's reason."""
    reason = ""
    with grpc.InferenceServerClient(server.url) as client:
        for response in stream(client, LONG):
            reason = response["finish_reason"][0].decode()
            yield response["text_output"][0].decode()
    if not reason:
        raise CutOffError("gRPC")


def over_http(server: ServerProcess) -> Iterator[str]:
    """The same."""
    reason = ""
    url = f"http://localhost:{server.http_port}/v2/models/{MODEL}/generate_stream"
    try:
        with urllib.request.urlopen(url, json.dumps(LONG).encode(), timeout=PATIENCE) as answer:
            for line in filter(bytes.strip, _lines(answer)):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise RuntimeError(event["error"])
                reason = event["finish_reason"]
                yield event["text_output"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from error
    if not reason:
        raise CutOffError("generate_stream")


def _lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """The lines of an answer. Raises IncompleteRead where the connection ends before the answer does.

    The class's own iteration over lines takes such an answer for a whole one.
    """
    rest = b""
    while part := answer.read1():
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def over_openai(server: ServerProcess) -> Iterator[str]:
    """The same."""
    reason = None
    url = f"http://localhost:{server.openai_port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
        message: Any = {"role": "user", "content": "x"}
        options: dict[str, Any] = {"max_tokens": 450, "temperature": 9, "logit_bias": {"0": -10000}}
        for event in client.chat.completions.create(model=MODEL, messages=[message], stream=True, **options):
            reason = event.choices[0].finish_reason
            yield event.choices[0].delta.content or ""
    if reason is None:
        raise CutOffError("OpenAI's interface")


INTERFACES = (over_grpc, over_http, over_openai)


class Load:
    """Clients of every interface in threads, who ask for one text after the other.

    A client whose text is not answered notes why, and asks on.

    clients: of each interface
    num_cut_off: streams that ended without a word
    Entering the block waits until every client receives a text. Raises UserError if one fails before.
    """

    def __init__(self, server: ServerProcess, clients: int = 1):
        count = clients * len(INTERFACES)
        self._pool = ThreadPoolExecutor(count)
        self.num_cut_off = 0
        self._begun: set[int] = set()
        self._stop = threading.Event()
        # When the first text that was not answered ended, and why.
        self._ends: list[Future[tuple[float, str]]] = [Future() for _ in range(count)]
        for number in range(count):
            self._pool.submit(self._ask, number, INTERFACES[number % len(INTERFACES)], server)

    def __enter__(self) -> "Load":
        while len(self._begun) < len(self._ends):
            failed = [end.result()[1] for end in self._ends if end.done()]
            if failed:
                self.stop()
                raise UserError(f"a request failed before anything happened: {failed}")
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._pool.shutdown()

    def reasons(self) -> list[str]:
        """Why the first text of each client that was not answered was not; waits until there is one."""
        return [end.result(PATIENCE)[1] for end in self._ends]

    def last_end(self) -> float:
        """When the last of these texts ended, in seconds of ``time.monotonic``."""
        return max(end.result(PATIENCE)[0] for end in self._ends)

    def last_end_so_far(self, default: float) -> float:
        """The same without waiting: of the texts that have ended so, or ``default`` if none has."""
        return max((end.result()[0] for end in self._ends if end.done()), default=default)

    def stop(self) -> None:
        """End every client at its next token."""
        self._stop.set()

    def _ask(self, number: int, ask: Callable[[ServerProcess], Iterator[str]], server: ServerProcess) -> None:
        end = self._ends[number]
        while not self._stop.is_set():
            try:
                for _ in ask(server):
                    self._begun.add(number)
                    if self._stop.is_set():
                        break
            except Exception as error:
                self.num_cut_off += isinstance(error, CutOffError)
                if not end.done():
                    end.set_result((time.monotonic(), f"{type(error).__name__}: {error}"))
                self._stop.wait(PAUSE)
        if not end.done():
            end.set_result((time.monotonic(), "the load was stopped"))


def readiness(server: ServerProcess) -> set[bool]:
    """What every interface says of it."""
    triton, openai_url = f"http://localhost:{server.http_port}/v2", f"http://localhost:{server.openai_port}"
    urls = [f"{triton}/health/ready", f"{triton}/models/{MODEL}/ready"]
    urls += [f"{openai_url}/health", f"{openai_url}/ready"]
    return {status_of(url) == 200 for url in urls} | {_is_ready_over_grpc(server)}


def status_of(url: str) -> int:
    """The HTTP status of an address, 0 if nobody answers there."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, http.client.HTTPException):
        return 0


def _is_ready_over_grpc(server: ServerProcess) -> bool:
    try:
        with grpc.InferenceServerClient(server.url) as client:
            return bool(client.is_server_ready() and client.is_model_ready(MODEL))
    except InferenceServerException:
        return False


def wait_for_readiness(server: ServerProcess, expected: bool) -> float:
    """Wait until every interface says so; returns the time. Raises UserError after ``PATIENCE`` seconds."""
    end = time.monotonic() + PATIENCE
    while readiness(server) != {expected}:
        if time.monotonic() > end:
            raise UserError(f"after {PATIENCE:g} seconds not every interface says ready: {expected}")
        time.sleep(0.05)
    return time.monotonic()


def model_process(server: ServerProcess) -> psutil.Process:
    """The process with the model: Triton's stub, or our worker."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (found,) = [
        process
        for process in processes
        if "stub" in process.name() or process.cmdline()[1:3] == ["-m", "triton_repo.worker"]
    ]
    return found
