"""A server of one's own, requests against it, and when their tokens came."""

import asyncio
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

from runtime.errors import UserError
from runtime.text.prompts import Prompt
from triton_repo.client import stream_async
from triton_repo.config import MODEL
from triton_repo.process import ServerProcess

# A request that takes longer than it takes for many prompts to be read: no token ends it.
LONG: dict[str, Any] = {"text_input": b"How many?", "max_tokens": 400, "stream": True, "end_id": -1}


@contextmanager
def running_server(bundle: Path, threads: int | None, *options: str) -> Iterator[ServerProcess]:
    """A server inside the block; afterwards its process has an exit status.

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
    """One request; seconds of ``time.perf_counter``.

    times: when every response came; counts: tokens so far in each
    """

    prompt: int
    begin: float
    times: tuple[float, ...]
    counts: tuple[int, ...]
    text: str

    @property
    def num_tokens(self) -> int:
        return self.counts[-1]

    @property
    def first_ms(self) -> float:
        """From asking to the first token."""
        return 1000 * (self.times[0] - self.begin)

    @property
    def token_ms(self) -> float:
        """Milliseconds a token, from the first to the last."""
        return 1000 * (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)

    @property
    def response_ms(self) -> float:
        """Milliseconds between two responses, on average: its share of the server, whatever its texts."""
        return 1000 * (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)

    @property
    def longest_ms(self) -> float:
        """The longest wait between two responses."""
        return 1000 * max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def text_of(url: str, options: dict[str, Any]) -> str:
    """The whole text of one streamed request."""
    texts = [outputs["text_output"][0] async for outputs in stream_async(url, {**options, "stream": True})]
    return b"".join(texts).decode()


async def served_together(url: str, count: int) -> bool:
    """Whether a server has slots for ``count`` requests: all have begun before any ends.

    Where a slot is missing, since it was not given back, one of them waits for another's end.
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
    """``count`` streamed requests, each over a connection of its own, as a user's would be.

    streams: so many at a time, and whoever has its answer asks the next (a closed loop)
    rate: they arrive on their own, so many a second on average (a Poisson process)
    """
    gaps = np.random.default_rng(0).exponential(1 / rate, count) if rate else np.zeros(count)
    delays = gaps.cumsum() - gaps[0]
    room = asyncio.Semaphore(streams or count)

    async def user(number: int) -> Served:
        await asyncio.sleep(delays[number])
        async with room:
            prompt = prompts[number % len(prompts)]
            options = {"text_input": prompt.text, "raw": prompt.raw, "max_tokens": max_tokens, "stream": True}
            begin = time.perf_counter()
            times, counts, texts = [], [], []
            async for outputs in stream_async(url, options, model=model):
                times.append(time.perf_counter())
                counts.append(int(outputs["num_output_tokens"][0]))
                texts.append(outputs["text_output"][0])
        progress.update()
        text = b"".join(texts).decode()
        return Served(number % len(prompts), begin, tuple(times), tuple(counts), text)

    name = f"{streams} streams" if streams else f"{rate:g} a second"
    with tqdm(total=count, desc=name, unit="request", leave=False) as progress:
        return list(await asyncio.gather(*(user(number) for number in range(count))))
