"""Random requests over OpenAI's interface: each must be answered, or refused with an error in OpenAI's shape.

    python -m benchmarks.load.fuzz_openai --bundle engines/ --requests 1000 --out build/fuzz_openai

Chats, completions and responses, with values out of range or of another kind, unknown fields, broken JSON,
wrong methods and addresses, streams, and clients that leave. No answer may hold a traceback or a path of the
machine. Every request follows from the seed and its number.
"""

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.load.clients import running_server
from benchmarks.load.fuzz import PATIENCE, STREAMS, ask_all, make_parser, report
from runtime.core.bundle import Bundle
from triton_repo.openai.app import CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH
from triton_repo.triton.tensors import MODEL

# Probabilities: that an optional field is there, that a value is not as it should be, that bytes of the body
# are, that a field is unknown, that the address or method is wrong, and that a client leaves.
PRESENT, WILD, SPOILT, UNKNOWN, ASTRAY, LEAVING = 0.2, 0.05, 0.03, 0.02, 0.02, 0.03
# What no answer may hold.
SECRETS = re.compile(r"Traceback|File \"|site-packages|\.py\b|/(?:home|root|tmp|usr|work)/")
WILD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**31, 1e308, float("nan"), "", "x" * 5000, "\x00", "\ud800", [], {}, [None]),
    *({"a": {"b": [1]}}, [[[[]]]], [-1, 2**40], ["x"] * 3000, {"": 1}),
]
MESSAGES: list[Any] = [
    [{"role": "user", "content": "How many?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    [{"role": "user"}],
    [{"role": "wizard", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 1, 2],
    "top_p": [0.5, 1],
    "top_k": [0, 1, 40],
    "min_p": [0, 0.05],
    "seed": [0, 7],
    "stop": ["\n", [".", "x"]],
    "frequency_penalty": [0, 0.5],
    "presence_penalty": [0, -0.5],
    "logit_bias": [{"17": -2.5}],
    "n": [1, 2],
    "stream": [True, False],
    "stream_options": [{"include_usage": True}],
    "user": ["somebody"],
    "max_tokens": [1, 5, 20],
}
FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT_PATH: {
        "messages": MESSAGES,
        **SAMPLING,
        "max_completion_tokens": [3],
        "logprobs": [True],
        "top_logprobs": [2],
        "response_format": [
            {"type": "text"},
            {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        ],
        "tools": [[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]],
        "tool_choice": ["auto", "none"],
        "chat_template_kwargs": [{}],
    },
    COMPLETION_PATH: {
        "prompt": ["How many?", ["a", "b"], [5, 6, 7], [[5, 6], [7]], ""],
        **SAMPLING,
        "logprobs": [0, 3],
        "echo": [True, False],
        "structured_outputs": [{"choice": ["yes", "no"]}, {"regex": "[a-z]{1,9}"}],
    },
    RESPONSES_PATH: {
        "input": ["How many?", [{"role": "user", "content": "x"}], [{"type": "message"}]],
        "instructions": ["Be brief."],
        "max_output_tokens": [16, 20],
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "stream")},
        "store": [False],
        "text": [{"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}],
    },
}
# These are almost always there.
USUAL = ("messages", "prompt", "input", "max_tokens", "max_output_tokens")
# What reading an answer raises that is no UTF-8, no JSON, or JSON of another shape.
UNREADABLE = (ValueError, RecursionError, TypeError, LookupError, AttributeError)
OTHER_PATHS = ("/v1/models/absent", "/v1/embeddings", "/v1/%2e%2e/etc", "/v1", CHAT_PATH + "/")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 1 when something is wrong, 2 for input that cannot be used, 130 for Ctrl-C."""
    return make_parser("fuzz_openai", __doc__, requests=1000).run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Send the requests, check that the server answers as before, write and print the report."""
    bundle = Bundle.load(args.bundle, verify=False)  # the server verifies the files
    with running_server(args.bundle, args.threads, "--max-num-seqs", str(STREAMS)) as server:
        url = f"http://localhost:{server.openai_port}"
        counts, messages, healthy = asyncio.run(run(url, args.requests, args.seed))
        log = server.log.read_text(encoding="utf-8", errors="replace")
    counts["tracebacks in the log"] = log.count("Traceback")
    status = server.process.returncode
    return report(args, "fuzz_openai.json", bundle, +counts, messages, healthy, status)


async def run(url: str, requests: int, seed: int) -> tuple[Counter[str], Counter[str], bool]:
    """As ``benchmarks.load.fuzz.run``."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(PATIENCE)) as session:
        before = await reference(session)
        counts, messages = await ask_all(lambda chance: ask(session, chance), requests, seed, STREAMS)
        after = await asyncio.gather(*(reference(session) for _ in range(STREAMS)))
    return counts, messages, set(after) == {before}


async def reference(session: aiohttp.ClientSession) -> str:
    """The text of an ordinary request, or the error instead."""
    body = {"model": MODEL, "messages": MESSAGES[0], "max_tokens": 24, "temperature": 0}
    try:
        async with session.post(CHAT_PATH, json=body) as answer:
            return str((await answer.json())["choices"][0]["message"]["content"])
    except (aiohttp.ClientError, TimeoutError, *UNREADABLE) as error:
        return repr(error)


async def ask(session: aiohttp.ClientSession, chance: random.Random) -> tuple[str, str]:
    """Send one random request and return its outcome and the error message, which is empty if there is none.

    The outcome is "served"; "refused" with an error in OpenAI's shape; "left": the client left before the
    end; "misshaped": another answer; "telling": one that holds a traceback or a path; "failed": an error of
    the server, of status 500; "lost": the connection ended, or the answer did not.
    """
    method, path, body = make_request(chance)
    leaves = chance.random() < LEAVING
    try:
        headers = {"Content-Type": "application/json"}
        async with session.request(method, path, data=body, headers=headers) as answer:
            if leaves:
                return "left", ""
            content = await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return "lost", repr(error)
    text = content.decode(errors="replace")
    if SECRETS.search(text):
        return "telling", text
    if answer.status == 200:
        return ("served" if _is_whole(answer.content_type, content) else "misshaped"), ""
    message = _error_in(content)
    if message is None:
        return "misshaped", text
    return ("failed" if answer.status >= 500 and answer.status != 503 else "refused"), message


def _is_whole(content_type: str, content: bytes) -> bool:
    """Whether an answer is one JSON object, or a stream of them that has an end."""
    try:
        text = content.decode()
        if content_type == "application/json":
            return isinstance(json.loads(text), dict)
        data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        ended = data[-1:] == ["[DONE]"]
        events = [json.loads(each) for each in data if each != "[DONE]"]
        # A stream of the responses ends with an event in place of a mark.
        return ended or (bool(events) and events[-1].get("type", "").startswith("response."))
    except UNREADABLE:
        return False


def _error_in(content: bytes) -> str | None:
    """The message of an error in OpenAI's shape; None for another body."""
    try:
        error = json.loads(content.decode())["error"]
        return str(error["message"]) if {"type", "param", "code"} <= error.keys() else None
    except UNREADABLE:
        return None


def make_request(chance: random.Random) -> tuple[str, str, bytes]:
    """Return method, path and body of a random request."""
    path = chance.choice(list(FIELDS))
    body: dict[str, Any] = {"model": MODEL}
    for name, values in FIELDS[path].items():
        if chance.random() < (0.98 if name in USUAL else PRESENT):
            body[name] = chance.choice(WILD_VALUES if chance.random() < WILD else values)
    if chance.random() < UNKNOWN:
        body[chance.choice(["", "nonsense", "a" * 5000])] = chance.choice(WILD_VALUES)
    if chance.random() < WILD:
        body["model"] = chance.choice(["absent", *WILD_VALUES])
    content = json.dumps(body).encode()
    if chance.random() < SPOILT:
        content = chance.choice(
            [b"", b"[" * 100_000, b"\xff" * 9, b'"x"', b"[1]", content[:-5], content + b"}"]
        )
    method = "POST"
    if chance.random() < ASTRAY:
        method, path = chance.choice(["GET", "PUT", "POST"]), chance.choice([path, *OTHER_PATHS])
    return method, path, content


if __name__ == "__main__":
    raise SystemExit(main())
