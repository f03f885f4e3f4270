"""A long mixed load on a real server, over gRPC and OpenAI's interface: every answer is compared.

    python -m benchmarks.load.soak --bundle engines/ --prompts prompts.jsonl --minutes 30 --out build/soak

Users ask without pause for greedy and sampled texts of different lengths, with and without stop words; some
leave half way, some ask for what cannot be served. The texts expected are plain decoding's. The server's
memory is watched.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import openai
import psutil
from tqdm import tqdm
from tritonclient.utils import InferenceServerException

from benchmarks.arguments import Parser, all_prompts
from benchmarks.load.clients import running_server, served_together, text_of
from benchmarks.report import write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least, positive
from runtime.core.prompts import Prompt
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder, encode_prompts
from triton_repo.triton.grpc_client import prompt_options, stream_async
from triton_repo.triton.process import ServerProcess
from triton_repo.triton.tensors import MODEL

NUM_QUESTIONS = 64
LENGTHS = (1, 8, 32, 64, 128)
# Shares of the requests whose user leaves half way, and of those that cannot be served.
LEAVING, WRONG = 0.1, 0.05
# Memory may grow freely in this first part of a run, and by this factor afterwards.
SETTLING = 1 / 6
MOST_GROWTH = 1.02
SAMPLE_SECONDS = 5.0


@dataclass(frozen=True)
class Question:
    """A request's options and the text it must get."""

    options: dict[str, Any]
    expected: str


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when something is wrong, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.load.soak", __doc__)
    parser.add("--bundle", "--prompts", "--threads")
    parser.add("--minutes", type=positive, default=30.0, help="how long users ask")
    parser.add("--streams", type=at_least(1), default=16, help="users at a time, half of them by gRPC")
    parser.add("--out", help="directory of soak.json")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Decode the expected texts, load a server, write and print the report; 1 if something is wrong."""
    bundle = Bundle.load(args.bundle, verify=False)  # the decoder verifies the files
    questions = make_questions(args, all_prompts(args.prompts, NUM_QUESTIONS))
    with running_server(args.bundle, args.threads, "--max-num-seqs", str(args.streams)) as server:
        counts, memory, slots_are_free = asyncio.run(load(server, questions, args.streams, 60 * args.minutes))
    status = server.process.returncode
    early, late = settled_memory(memory)
    growth = late / early
    report = {
        "counts": dict(counts),
        "memory_mib": memory,
        "memory_growth_after_settling": growth,
        "slots_are_free_afterwards": slots_are_free,
        "server_exit_status": status,
        "settings": {"minutes": args.minutes, "streams": args.streams},
    }
    write_report(args, "soak.json", report, bundle=bundle)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    print(f"memory {early:.0f} MiB after settling, {late:.0f} at the end ({growth:.3f} times)")
    print(f"afterwards all slots {'are free' if slots_are_free else 'ARE NOT FREE'}, exit status {status}")
    bad = counts["different"] + counts["failed"] + counts["wrong but served"]
    return int(bool(bad or status or not slots_are_free or growth > MOST_GROWTH))


def settled_memory(memory: Sequence[float]) -> tuple[float, float]:
    """Return the median of the second part of the run and of the last, each ``SETTLING`` of it.

    Medians, because the cache grows and shrinks with the texts.
    """
    size = max(1, int(len(memory) * SETTLING))
    return statistics.median(memory[size : 2 * size] or memory), statistics.median(memory[-size:])


def make_questions(args: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Question]:
    """Make mixed requests, always the same, with the texts of plain decoding."""
    decoder = SpeculativeDecoder.from_bundle(args.bundle, method="plain", num_threads=args.threads)
    asked = [prompts[number * len(prompts) // NUM_QUESTIONS] for number in range(NUM_QUESTIONS)]
    encoded = encode_prompts(decoder, asked, max_new_tokens=max(LENGTHS), where="--prompts:")
    chance = random.Random(0)
    questions = []
    for number, prompt in enumerate(tqdm(asked, desc="expected texts", unit="text")):
        count = chance.choice(LENGTHS)
        stop_words = chance.choice([(), (), (".",), ("\n",)])
        sampling: dict[str, Any] = {"temperature": 0.75, "top_k": 50, "seed": number} if number % 2 else {}
        chunks = decoder.stream(
            encoded[number],
            max_new_tokens=count,
            stop_strings=stop_words,
            sampling=SamplingParams(**sampling),
        )
        options = {**prompt_options(prompt), "max_tokens": count, **sampling}
        options |= {"stop_words": list(stop_words)} if stop_words else {}
        questions.append(Question(options, "".join(chunk.text for chunk in chunks)))
    return questions


async def load(
    server: ServerProcess, questions: Sequence[Question], streams: int, seconds: float
) -> tuple[Counter[str], list[float], bool]:
    """Let users send requests until ``seconds`` have passed.

    Returns counts of the requests' outcomes, the server's memory in MiB over time, and whether all slots
    are free afterwards.
    """
    counts: Counter[str] = Counter()
    # Every slot holds the longest text once, after which its cache does not grow.
    longest = max(questions, key=lambda question: len(str(question.options)) + len(question.expected))
    options = {**longest.options, "stop_words": [], "max_tokens": max(LENGTHS)}
    await asyncio.gather(*(text_of(server.url, options) for _ in range(streams)))
    memory = [resident_mib(server)]
    end = time.monotonic() + seconds
    with tqdm(total=round(seconds), unit="s", desc="load") as progress:

        async def watch() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(min(SAMPLE_SECONDS, seconds / 10))
                memory.append(resident_mib(server))
                progress.update(round(seconds - max(end - time.monotonic(), 0)) - progress.n)
                progress.set_postfix(counts)

        async def user(number: int) -> None:
            chance = random.Random(number)
            client = openai_client if number % 2 else None
            while time.monotonic() < end:
                counts[await ask(server.url, client, chance, questions)] += 1

        url = f"http://localhost:{server.openai_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai_client:
            await asyncio.gather(watch(), *(user(number) for number in range(streams)))
    return counts, memory, await served_together(server.url, streams)


async def ask(
    url: str, client: openai.AsyncOpenAI | None, chance: random.Random, questions: Sequence[Question]
) -> str:
    """Send one request of a user, by gRPC or by an OpenAI client, and return its outcome."""
    question = chance.choice(questions)
    kind = chance.random()

    def parts(**changed: Any) -> AsyncIterator[bytes]:
        options = {**question.options, **changed}
        return _over_grpc(url, options) if client is None else _over_openai(client, options)

    try:
        if kind < WRONG:
            wrong: dict[str, Any] = chance.choice([{"temperature": -1.0}, {"max_tokens": -1}])
            async for _ in parts(**wrong):
                pass
            return "wrong but served"
        if kind < WRONG + LEAVING:
            async with aclosing(parts()) as texts:  # type: ignore[type-var]
                async for _ in texts:
                    if chance.random() < 0.3:
                        break
            return "left"
        found = b"".join([text async for text in parts()]).decode()
        return "the same" if found == question.expected else "different"
    except (InferenceServerException, openai.APIError) as error:
        return "refused" if kind < WRONG and "must be" in str(error) else "failed"


async def _over_grpc(url: str, options: dict[str, Any]) -> AsyncIterator[bytes]:
    async with aclosing(stream_async(url, {**options, "stream": True})) as responses:
        async for outputs in responses:
            yield outputs["text_output"][0]


async def _over_openai(client: openai.AsyncOpenAI, options: dict[str, Any]) -> AsyncIterator[bytes]:
    """Of a chat, or of a completion of a prompt that is raw."""
    named = {"max_tokens", "temperature", "seed"} & options.keys()
    body: dict[str, Any] = {"temperature": 0.0, **{name: options[name] for name in named}}
    body |= {"model": MODEL, "stream": True, "stop": options.get("stop_words") or None}
    body["extra_body"] = {"top_k": options["top_k"]} if "top_k" in options else {}
    if options.get("raw"):
        async with await client.completions.create(prompt=options["text_input"], **body) as events:
            async for event in events:
                yield event.choices[0].text.encode()
        return
    messages: Any = [{"role": "user", "content": options.get("text_input")}]
    if "messages" in options:
        messages = json.loads(options["messages"])
    async with await client.chat.completions.create(messages=messages, **body) as chunks:
        async for chunk in chunks:
            yield (chunk.choices[0].delta.content or "").encode()


def resident_mib(server: ServerProcess) -> float:
    """Return the resident memory of the launcher, the server and its stubs together."""
    launcher = psutil.Process(server.process.pid)
    found = 0
    for process in (launcher, *launcher.children(recursive=True)):
        try:
            found += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
