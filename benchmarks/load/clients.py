"""Requests against a served bundle, in a closed loop or as a Poisson process, and when their tokens came."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm
from tritonclient.utils import InferenceServerException

from runtime.text.prompts import Prompt
from triton_repo.client import stream_async

# A request that takes longer than it takes for many prompts to be read: no token ends it.
LONG: dict[str, Any] = {"text_input": b"How many?", "max_tokens": 400, "stream": True, "end_id": -1}


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


async def ask(url: str, prompt: Prompt, index: int, max_tokens: int) -> Served:
    """One streamed request; the connection is its own, as a user's would be."""
    options = {"text_input": prompt.text, "raw": prompt.raw, "max_tokens": max_tokens, "stream": True}
    begin = time.perf_counter()
    times, counts, texts = [], [], []
    async for outputs in stream_async(url, options):
        times.append(time.perf_counter())
        counts.append(int(outputs["num_output_tokens"][0]))
        texts.append(outputs["text_output"][0])
    return Served(index, begin, tuple(times), tuple(counts), b"".join(texts).decode())


async def served_together(url: str, count: int) -> bool:
    """Whether a server has rows for ``count`` requests: all have begun before any ends.

    Where a row is missing, since it was not given back, one of them waits for another's end.
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


async def closed_loop(
    url: str, prompts: Sequence[Prompt], *, streams: int, count: int, max_tokens: int
) -> list[Served]:
    """``count`` requests, ``streams`` of them at a time: whoever has its answer asks the next."""
    waiting = iter(range(count))
    found: list[Served] = []
    with tqdm(total=count, desc=f"{streams} streams", unit="request", leave=False) as progress:

        async def user() -> None:
            for number in waiting:
                index = number % len(prompts)
                found.append(await ask(url, prompts[index], index, max_tokens))
                progress.update()

        await asyncio.gather(*(user() for _ in range(streams)))
    return found


async def poisson(
    url: str, prompts: Sequence[Prompt], *, rate: float, count: int, max_tokens: int, seed: int
) -> list[Served]:
    """``count`` requests that arrive on their own, ``rate`` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    with tqdm(total=count, desc=f"{rate:g} a second", unit="request", leave=False) as progress:

        async def user(number: int, delay: float) -> Served:
            await asyncio.sleep(delay)
            index = number % len(prompts)
            served = await ask(url, prompts[index], index, max_tokens)
            progress.update()
            return served

        delays = gaps.cumsum() - gaps[0]
        return list(await asyncio.gather(*(user(n, float(d)) for n, d in enumerate(delays))))
