"""Clients of a server that record when tokens come, or load every interface; and whether it is ready."""

import asyncio
import http.client
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
from tqdm import tqdm
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from runtime.core.prompts import Prompt
from triton_repo.triton.grpc_client import prompt_options, stream, stream_async
from triton_repo.triton.process import ServerProcess
from triton_repo.triton.tensors import MODEL

# A request that runs for longer than the server takes to read many prompts: no token ends it.
LONG: dict[str, Any] = {"text_input": b"How many?", "max_tokens": 400, "stream": True, "end_id": -1}
# With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
SLOW = {"text_input": "x", "max_tokens": 500, "stream": True, "end_id": -1, "temperature": 9.0}
# Seconds until a request or a process counts as hanging, and until a client asks again.
PATIENCE, PAUSE = 120.0, 0.2


@contextmanager
def running_server(bundle: Path, threads: int | None, *options: str) -> Iterator[ServerProcess]:
    """Run a server inside the block; afterwards ``process.returncode`` holds its exit status.

    Raises UserError when it cannot load the bundle.
    """
    with tempfile.TemporaryDirectory() as directory:
        server = ServerProcess(bundle, Path(directory) / "log", "--threads", str(threads or 0), *options)
        try:
            if not server.is_ready:
                raise UserError(f"the server cannot load the bundle:\n{server.log.read_text()[-2000:]}")
            yield server
        finally:
            server.stop()


@dataclass(frozen=True)
class Served:
    """One request that was served; times are seconds of ``time.perf_counter``.

    times: when each response came; counts: tokens of the output up to each response
    num_input_tokens: those of the prompt
    """

    prompt: int
    begin: float
    times: tuple[float, ...]
    counts: tuple[int, ...]
    text: str
    num_input_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.counts[-1]

    @property
    def first_ms(self) -> float:
        """Milliseconds from sending the request to the first token."""
        return 1000 * (self.times[0] - self.begin)

    @property
    def token_ms(self) -> float:
        """Milliseconds per token after the first."""
        return 1000 * (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)

    @property
    def response_ms(self) -> float:
        """Mean milliseconds between two responses, which say how often the server took its turn."""
        return 1000 * (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def longest_ms(self) -> float:
        """Milliseconds of the longest wait between two responses."""
        return 1000 * max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def text_of(url: str, options: dict[str, Any]) -> str:
    """Send one request and return its whole text."""
    texts = [outputs["text_output"][0] async for outputs in stream_async(url, {**options, "stream": True})]
    return b"".join(texts).decode()


async def served_together(url: str, count: int) -> bool:
    """Return whether a server decodes ``count`` requests at a time: all have begun before any ends.

    If a slot was not given back by an earlier request, one of them has to wait until another ends. A client
    on a busy machine may read that end late and miss the wait, so False is certain and True is likely.
    """
    begun: set[int] = set()
    together = True

    async def user(number: int) -> None:
        nonlocal together
        try:
            async for outputs in stream_async(url, LONG):
                begun.add(number)
                if outputs["finish_reason"][0]:
                    together &= len(begun) == count
        except InferenceServerException:
            together = False

    await asyncio.gather(*(user(number) for number in range(count)))
    return together


async def receive(url: str, prompt: int, options: dict[str, Any], model: str = MODEL) -> Served:
    """Send one request, over a connection of its own, and return what was served.

    prompt: its number
    """
    begin = time.perf_counter()
    times, counts, texts = [], [], []
    async for outputs in stream_async(url, options, model=model):
        times.append(time.perf_counter())
        counts.append(int(outputs["num_output_tokens"][0]))
        texts.append(outputs["text_output"][0])
    length = int(outputs["num_input_tokens"][0])
    return Served(prompt, begin, tuple(times), tuple(counts), b"".join(texts).decode(), length)


async def converse(
    url: str, conversations: Sequence[Sequence[str]], *, max_tokens: int, at_a_time: int = 1
) -> list[list[Served]]:
    """Hold conversations; returns what was served in every turn.

    Every second one draws its tokens at temperature 1, with its number as the seed; the others are greedy.

    conversations: the user's messages of each; the assistant's are what the server has answered
    at_a_time: conversations that are held together
    """
    found: list[list[Served]] = [[] for _ in conversations]
    numbers = iter(range(len(conversations)))
    with tqdm(total=len(conversations), unit="conversation", leave=False) as progress:

        async def user() -> None:
            for number in numbers:
                sampling: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {}
                messages: list[dict[str, str]] = []
                for question in conversations[number]:
                    messages.append({"role": "user", "content": question})
                    options = {"messages": json.dumps(messages), "max_tokens": max_tokens, "stream": True}
                    found[number].append(await receive(url, number, {**options, **sampling}))
                    messages.append({"role": "assistant", "content": found[number][-1].text})
                progress.update()

        await asyncio.gather(*(user() for _ in range(at_a_time)))
    return found


async def send(
    url: str,
    prompts: Sequence[Prompt],
    *,
    count: int,
    max_tokens: int,
    streams: int | None = None,
    rate: float | None = None,
    model: str = MODEL,
) -> list[Served]:
    """Send ``count`` requests, each over a connection of its own, and return what was served, in their order.

    streams: requests at a time; the next one begins when one has ended (a closed loop)
    rate: requests per second on average, which begin at random times (a Poisson process)
    """
    gaps = np.random.default_rng(0).exponential(1 / rate, count) if rate else np.zeros(count)
    delays = gaps.cumsum() - gaps[0]
    room = asyncio.Semaphore(streams or count)

    async def user(number: int) -> Served:
        await asyncio.sleep(delays[number])
        async with room:
            prompt = prompts[number % len(prompts)]
            options = {**prompt_options(prompt), "max_tokens": max_tokens, "stream": True}
            served = await receive(url, number % len(prompts), options, model)
        progress.update()
        return served

    name = f"{streams} streams" if streams else f"{rate:g} a second"
    with tqdm(total=count, desc=name, unit="request", leave=False) as progress:
        return list(await asyncio.gather(*(user(number) for number in range(count))))


class CutOffError(Exception):
    """A stream has ended, and has said neither that the text is whole nor what went wrong."""


def over_grpc(server: ServerProcess) -> Iterator[str]:
    """The parts of a long text. Raises CutOffError, and other errors with the server's reason."""
    reason = ""
    with grpc.InferenceServerClient(server.url) as client:
        for response in stream(client, SLOW):
            reason = response["finish_reason"][0].decode()
            yield response["text_output"][0].decode()
    if not reason:
        raise CutOffError("gRPC")


def over_http(server: ServerProcess) -> Iterator[str]:
    """The same."""
    reason = ""
    url = f"http://localhost:{server.http_port}/v2/models/{MODEL}/generate_stream"
    try:
        with urllib.request.urlopen(url, json.dumps(SLOW).encode(), timeout=PATIENCE) as answer:
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
