"""vLLM's OpenAI server in a process of its own, and what tests ask of it. Only the standard library."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_SECONDS, REQUEST_SECONDS = 900, 600
# On a CPU vLLM's blocks have 128 tokens. Most prompts are shorter, and only whole blocks are reused.
BLOCK_SIZE = 32
OPTIONS = (
    *("--dtype", "float32"),
    "--enforce-eager",
    *("--max-num-seqs", "8"),
    "--enable-prefix-caching",
    *("--block-size", str(BLOCK_SIZE)),
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
# vLLM gives each worker cores of its own and keeps one back for the server, of which there may be too few.
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Server:
    model: Path
    port: int

    def complete(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """The greedy continuation of a prompt."""
        with self.open(prompt_ids, num_tokens, stream=False) as answer:
            found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found

    def stream(self, prompt_ids: list[int], num_tokens: int) -> list[list[int]]:
        """As ``complete``, in the parts in which it comes."""
        with self.open(prompt_ids, num_tokens, stream=True) as answer:
            lines = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
        return [json.loads(line)["choices"][0]["token_ids"] for line in lines]

    def open(self, prompt_ids: list[int], num_tokens: int, *, stream: bool, ignore_end: bool = False) -> Any:
        """The answer to a completion request, open. ignore_end: go on after the end-of-text token"""
        body = {
            "model": str(self.model),
            "prompt": prompt_ids,
            "max_tokens": num_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": stream,
            "ignore_eos": ignore_end,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=REQUEST_SECONDS)

    def metric(self, name: str) -> float:
        """The sum of a counter over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert found, f"no metric {name}"
        return sum(found)


@contextmanager
def serve(
    model: Path,
    log: Path,
    speculative: dict[str, Any] | None = None,
    *,
    options: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """A server that answers, until the block ends. Raises RuntimeError with the log's errors if it stops.

    options: of the server, besides ``OPTIONS``; environment: variables besides ``ENVIRONMENT``
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *OPTIONS, *options]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    with log.open("w") as out:
        # The server starts processes of its own, which end with their group.
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
        try:
            _wait(process, port, log)
            yield Server(model, port)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "Error" in line]
            raise RuntimeError("the server stopped:\n" + "\n".join(errors or lines[-30:]))
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not answer in {START_SECONDS} s")
