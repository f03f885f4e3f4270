"""Random requests to a real Triton server: each must end, with a text or with an error, and leave it healthy.

    python -m benchmarks.load.fuzz --bundle engines/ --requests 2000 --out build/fuzz

Requests go over gRPC as they are made, past what tritonclient would check: values out of range, tensors
missing, doubled, unknown, of another type or shape, with bytes cut off or too many, text that is not
UTF-8, prompts of a megabyte, clients that leave. Every request follows from the seed and its number.
"""

import argparse
import asyncio
import random
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from tqdm import tqdm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from benchmarks.arguments import Parser
from benchmarks.load.clients import LONG, running_server, served_together, text_of
from benchmarks.report import write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from triton_repo.triton.grpc_client import stream_async
from triton_repo.triton.tensors import (
    MODEL,
    MODELS,
    ONLY,
    OTHER_PROMPTS,
    PROMPTS,
    TEXT,
    TOKENS_MODEL,
    TensorInfo,
    inputs_of,
)

STREAMS = 16
# Seconds until a request counts as lost.
PATIENCE = 60.0
# Probabilities: that an optional input is there, that a value or a tensor is not as it should be, and that a
# client leaves.
PRESENT, WILD, SPOILT, LEAVING = 0.25, 0.06, 0.03, 0.02
MEGABYTE = 1_000_000
PACKED = {"INT32": "<i", "FP32": "<f", "UINT64": "<Q", "BOOL": "<?"}
# Values that the server accepts, for inputs of which most values are refused.
USUAL: dict[str, Sequence[Any]] = {
    "text_input": [b"How many?", "Ünïcödé ✓".encode(), b"x" * 40],
    "messages": [b'[{"role": "user", "content": "How many?"}]'],
    "template_options": [b"{}"],
    "input_ids": range(200),
    "max_tokens": [1, 2, 20, 60],
    "stop_words": [b".", b"\n", b"", "✓".encode()],
    "end_id": range(200),
    "temperature": [0.0, 0.7, 1.0],
    "top_k": [0, 1, 40],
    "top_p": [0.5, 0.9, 1.0],
    "min_p": [0.0, 0.05],
    "repetition_penalty": [1.0, 1.2],
    "presence_penalty": [0.0, 0.5],
    "frequency_penalty": [0.0, -0.5],
    "logit_bias": [b'{"17": -2.5}'],
    "top_log_probs": [0, 1, 20],
    "length_penalty": [1.0],
    "bad_words": [b""],
    "guided_decoding_guide_type": [b"regex"],
    "guided_decoding_guide": [b"[a-z]{1,20}", b"(yes|no)+"],
}
GUIDES = ("guided_decoding_guide_type", "guided_decoding_guide")
WILD_VALUES: dict[str, list[Any]] = {
    "BYTES": [
        *(b"", b"\xff\xfe", b"\x00" * 9, b"{", b"[1]", b"\xf0\x9f" * 50, b"[" * 100_000),
        *(b'{"a": "b"}', b'{"1": 1e999}', b'{"1": 1.7e308}', b'{"1": 1' + b"0" * 400 + b"}"),
    ],
    "INT32": [-(2**31), -1, 0, 2**31 - 1, 4096],
    "FP32": [float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 1e30],
    "UINT64": [0, 2**64 - 1],
    "BOOL": [False, True],
}


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when something is wrong, 2 for input that cannot be used, 130 for Ctrl-C."""
    return make_parser("fuzz", __doc__, requests=2000).run(measure, argv)


def make_parser(name: str, doc: str | None, *, requests: int) -> Parser:
    """The arguments of a module that sends random requests. requests: their number by default"""
    parser = Parser(f"benchmarks.load.{name}", doc)
    parser.add("--bundle", "--threads")
    parser.add("--requests", type=at_least(1), default=requests, help="how many")
    parser.add("--seed", type=int, default=0, help="other seeds make other requests")
    parser.add("--out", help=f"directory of {name}.json")
    return parser


def measure(args: argparse.Namespace) -> int:
    """Send the requests, check that the server answers as before, write and print the report."""
    bundle = Bundle.load(args.bundle, verify=False)  # the server verifies the files
    with running_server(args.bundle, args.threads, "--tokens", "--max-num-seqs", str(STREAMS)) as server:
        counts, messages, healthy = asyncio.run(run(server.url, args.requests, args.seed))
    return report(args, "fuzz.json", bundle, counts, messages, healthy, server.process.returncode)


def report(
    args: argparse.Namespace,
    name: str,
    bundle: Bundle,
    counts: Counter[str],
    messages: Counter[str],
    healthy: bool,
    status: int,
) -> int:
    """Write and print what was found; 1 if something is wrong.

    name: the file's; counts, messages, healthy: as of ``run``; status: with which the server ended
    """
    found = {
        "counts": dict(counts),
        "messages": dict(messages.most_common()),
        "healthy": healthy,
        "server_exit_status": status,
        "settings": {"requests": args.requests, "seed": args.seed, "streams": STREAMS},
    }
    write_report(args, name, found, bundle=bundle)
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    answers = "answers as before" if healthy else "DOES NOT ANSWER AS BEFORE"
    print(f"the server {answers}, exit status {status}")
    return int(not passed(counts, healthy, status))


def passed(counts: Mapping[str, int], healthy: bool, status: int) -> bool:
    """Return whether every request and the server ended as they should."""
    return healthy and status == 0 and set(counts) <= {"served", "refused", "left"}


async def run(url: str, requests: int, seed: int) -> tuple[Counter[str], Counter[str], bool]:
    """Return counts of outcomes, counts of error messages without their numbers, and whether all is well."""
    before = await reference(url)
    async with grpc.aio.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        counts, messages = await ask_all(lambda chance: ask(url, stub, chance), requests, seed, STREAMS)
    after = await asyncio.gather(*(reference(url) for _ in range(STREAMS)))
    return counts, messages, set(after) == {before} and await served_together(url, STREAMS)


async def ask_all(
    ask: Callable[[random.Random], Awaitable[tuple[str, str]]], requests: int, seed: int, streams: int
) -> tuple[Counter[str], Counter[str]]:
    """Send random requests, ``streams`` at a time; returns the counts of ``run``.

    ask: sends one, made with the given numbers, and returns its outcome and error message
    """
    counts: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    numbers = iter(range(requests))
    with tqdm(total=requests, desc="fuzz", unit="request") as progress:

        async def client() -> None:
            for number in numbers:
                outcome, message = await ask(random.Random(f"{seed} {number}"))
                counts[outcome] += 1
                if message:
                    messages[re.sub(r"-?\d+(\.\d+)?", "#", message)[:160]] += 1
                progress.update()

        await asyncio.gather(*(client() for _ in range(streams)))
    return counts, messages


async def reference(url: str) -> str:
    """Send an ordinary request and return its text, or the error instead."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await text_of(url, {"text_input": "How many?", "max_tokens": 24})
    except (InferenceServerException, TimeoutError) as error:
        return repr(error)


async def ask(url: str, stub: Any, chance: random.Random) -> tuple[str, str]:
    """Send one random request and return its outcome and the error message, which is empty if there is none.

    The outcome is "served"; "refused" with a reason; "left": the client left before the end; "unclear":
    refused without a reason that helps; "broken": more tokens than were asked for, or an error of the
    connection; "lost": it did not end.
    """
    message, tokens = "", 0
    try:
        async with asyncio.timeout(PATIENCE):
            if chance.random() < LEAVING:
                # Long, because Triton 2.51 may keep a stream that is cancelled as it ends (docs/serving.md).
                async with aclosing(stream_async(url, LONG)) as responses:
                    await anext(responses)
                return "left", ""
            request, max_tokens = make_request(chance)

            async def requests() -> AsyncIterator[Any]:
                yield request

            async for response in stub.ModelStreamInfer(requests()):
                message = response.error_message or message
                names = [output.name for output in response.infer_response.outputs]
                if "num_output_tokens" in names:
                    raw = response.infer_response.raw_output_contents[names.index("num_output_tokens")]
                    (tokens,) = struct.unpack("<i", raw)
    except TimeoutError:
        return "lost", ""
    except (grpc.aio.AioRpcError, InferenceServerException) as error:
        return "broken", str(error)
    if message:
        unclear = "Traceback" in message or "internal" in message.lower()
        return ("unclear" if unclear else "refused"), message
    # Without tokens of its own, a request may ask for the scores of its prompt.
    return ("served" if min(1, max_tokens) <= tokens <= max_tokens else "broken"), ""


def make_request(chance: random.Random) -> tuple[Any, int]:
    """Return a random ``ModelInferRequest`` and how many tokens it asks for."""
    model = chance.choice([MODEL, MODEL, TOKENS_MODEL])
    request = service_pb2.ModelInferRequest(model_name=model, id=str(chance.randrange(100)))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if chance.random() < 0.01:
        request.model_name = chance.choice(["", "absent", "../ctc_llm", "ctc_llm\x00"])
    if chance.random() < 0.01:
        request.model_version = chance.choice(["2", "-1", "x"])
    max_tokens = 2**31  # without this input: all that the context has room for
    conversation = MODELS[model] == TEXT and chance.random() < PRESENT
    prompt = "messages" if conversation else PROMPTS[MODELS[model]].name
    together = {prompt, "max_tokens"}
    left_out = {"text_input"} if conversation else {info.name for info in OTHER_PROMPTS}
    # The two inputs of a grammar are given together.
    (together if chance.random() < PRESENT else left_out).update(GUIDES)
    for info in inputs_of(MODELS[model]):
        probability = PRESENT
        if info.name in together:
            probability = 0.98
        elif info.name in left_out:
            probability = 0.01
        if chance.random() < probability:
            values = make_values(chance, info)
            if info.name == "max_tokens":
                max_tokens = values[0]
            for _ in range(2 if chance.random() < 0.01 else 1):
                add_tensor(request, info.name, *make_tensor(chance, info.datatype, values))
    if chance.random() < 0.03:
        name = chance.choice(["", "nonsense", "TEXT_INPUT", "a" * 5000])
        add_tensor(request, name, *make_tensor(chance, "INT32", [1]))
    return request, max_tokens


def make_values(chance: random.Random, info: TensorInfo) -> list[Any]:
    """Return random elements for an input."""
    kind = info.datatype
    count = 1 if info.size == 1 else chance.choice([0, 1, 2, 30])
    if info.name == "text_input" and chance.random() < 0.01:
        return [chance.choice([b"a", b" ", b"a b ", "ü".encode()]) * MEGABYTE]

    def value() -> Any:
        if chance.random() < WILD:
            return chance.choice(WILD_VALUES[kind])
        if info.name in ONLY:
            return ONLY[info.name]
        return chance.choice(USUAL.get(info.name, WILD_VALUES[kind]))

    return [value() for _ in range(count)]


def make_tensor(chance: random.Random, kind: str, values: list[Any]) -> tuple[str, list[int], bytes]:
    """Return type, shape and bytes of a tensor; some contradict each other."""
    raw = packed(kind, values)
    shape = [1, len(values)]
    if chance.random() < SPOILT:
        spoil = chance.randrange(5)
        if spoil == 0:
            kind = chance.choice([*PACKED, "BYTES", "FP64", "", "TYPE_INT32"])
        elif spoil == 1:
            shape = chance.choice([[], [1], [1, 0], [1, 2], [2, 1], [1, 1, 1], [-1, 1], [1, 2**40], [0]])
        elif spoil == 2:
            raw = raw[: chance.randrange(len(raw) + 1)]
        elif spoil == 3:
            raw += chance.randbytes(chance.choice([1, 4, 100]))
        elif spoil == 4:
            raw = chance.randbytes(len(raw))
    return kind, shape, raw


def packed(kind: str, values: list[Any]) -> bytes:
    """Return the elements' bytes in Triton's protocol."""
    if kind == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return b"".join(struct.pack(PACKED[kind], value) for value in values)


def add_tensor(request: Any, name: str, kind: str, shape: list[int], raw: bytes) -> None:
    request.inputs.add(name=name, datatype=kind, shape=shape)
    request.raw_input_contents.append(raw)


if __name__ == "__main__":
    raise SystemExit(main())
