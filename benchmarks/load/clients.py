"""Start a server, send requests to it, and record when their tokens come."""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from runtime.core.prompts import Prompt
from triton_repo.triton.grpc_client import prompt_options, stream_async
from triton_repo.triton.process import ServerProcess
from triton_repo.triton.tensors import MODEL

# A request that runs for longer than the server takes to read many prompts: no token ends it.
LONG: dict[str, Any] = {"text_input": b"How many?", "max_tokens": 400, "stream": True, "end_id": -1}


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
