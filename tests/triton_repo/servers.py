"""A real tritonserver for tests, and short ways to ask it."""

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
from tritonclient import grpc

from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.guard import PREFIX
from triton_repo.triton.process import ServerProcess, free_ports
from triton_repo.triton.tensors import MODEL, TOKENS_MODEL

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 150)
MAX_NUM_SEQS, MAX_QUEUE_SIZE = 4, 16
GENERATE, GENERATE_STREAM = f"models/{MODEL}/generate", f"models/{MODEL}/generate_stream"
# In the log when the launcher has replaced a tritonserver that failed.
RESTARTED = "serve: ready again after "
# Seconds until a request or a process counts as hanging.
PATIENCE = 120


class Server(ServerProcess):
    """A running server with few sequences and a short queue."""

    def __init__(self, bundle: Path, log: Path, *options: str):
        limits = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-size", str(MAX_QUEUE_SIZE)]
        super().__init__(bundle, log, "--threads", "1", "--num-nodes", "6", *limits, *options)

    def ask(self, **options: Any) -> list[dict[str, Any]]:
        """All responses of one request over gRPC."""
        with grpc.InferenceServerClient(self.url) as client:
            model = TOKENS_MODEL if "input_ids" in options else MODEL
            return list(stream(client, {"max_tokens": 24, "stream": True, **options}, model=model))

    def text(self, **options: Any) -> str:
        return b"".join(response["text_output"][0] for response in self.ask(**options)).decode()

    def fetch(self, path: str, body: bytes | None = None) -> bytes:
        """The answer of the HTTP address ``/v2/<path>``."""
        url = f"http://localhost:{self.http_port}/v2/{path}"
        with urllib.request.urlopen(url, body, timeout=PATIENCE) as answer:
            return bytes(answer.read())

    def metrics(self) -> str:
        """What Prometheus reads."""
        url = f"http://localhost:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return bytes(answer.read()).decode()

    def counter(self, name: str, model: str = MODEL) -> float:
        """The value of one of a model's counters."""
        lines = self.metrics().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f'{name}{{model="{model}"')]
        return float(value)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the log contains this so often."""
        end = time.monotonic() + PATIENCE
        while self.log.read_text().count(text) < count:
            assert time.monotonic() < end, f"not in the log: {text!r}"
            time.sleep(0.1)

    def text_after_signal(self, number: signal.Signals, **options: Any) -> str:
        """The text of a request during which the server gets a signal."""
        with grpc.InferenceServerClient(self.url) as client:
            responses = stream(client, {"stream": True, **options})
            first = next(responses)
            self.process.send_signal(number)
            return b"".join(response["text_output"][0] for response in [first, *responses]).decode()


class KeptServer:
    """One server for many tests, and a new one after a test has ended it: tests run in any order."""

    def __init__(self, start: Callable[[], Server]):
        self._start = start
        self._server: Server | None = None

    def running(self) -> Server:
        if self._server is None or self._server.process.poll() is not None:
            self._server = self._start()
        return self._server

    def stop(self) -> None:
        """End the server, if a test has not, and see that it ends in order."""
        if self._server is not None and self._server.process.poll() is None:
            assert self._server.stop() == 0


@contextmanager
def openai_client(url: str, *options: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client of the command ``triton_repo.openai.server``."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "triton_repo.openai.server", "--url", url, "--port", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert running.stdout.readline().endswith(f" on http://127.0.0.1:{port}/v1\n")
            address = f"http://127.0.0.1:{port}/v1"
            with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=PATIENCE) as client:
                yield client
        finally:
            running.terminate()


def damaged_bundle(bundle: Path, directory: Path) -> Path:
    """A copy of a bundle whose weights have one wrong byte."""
    damaged = Path(shutil.copytree(bundle, directory / "damaged"))
    path = damaged / "backbone.onnx.data"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    return damaged


def expected_text(decoder: SpeculativeDecoder, text: str, count: int = 24, **sampling: Any) -> str:
    """The runtime's own text."""
    prompt = decoder.prompt_tokenizer.encode(text)
    chunks = decoder.stream(prompt, max_new_tokens=count, sampling=SamplingParams(**sampling))
    return "".join(chunk.text for chunk in chunks)


def assert_nothing_is_left_by(server: Server, end: Callable[[], None]) -> None:
    """Of its processes, its ports, its directory and its shared memory."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    (directory,) = {arg for process in processes for arg in process.cmdline() if is_launchers(arg)}
    # The guard and our worker, or the guard, tritonserver and a stub with its shared memory.
    assert len(processes) == 2 or list(Path("/dev/shm").glob(f"{Path(directory).name}-*"))
    end()
    server.process.wait()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert not Path(directory).exists()
    assert not list(Path("/dev/shm").glob(f"{Path(directory).name}-*"))
    for number in (server.http_port, server.grpc_port, server.metrics_port, server.openai_port):
        with socket.create_server(("127.0.0.1", number)):
            pass


def is_launchers(argument: str) -> bool:
    path = Path(argument)
    return path.parent == Path(tempfile.gettempdir()) and path.name.startswith(PREFIX)
