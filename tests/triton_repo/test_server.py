"""The real tritonserver with a tiny bundle: the runtime's text, and a clear error for every fault."""

import asyncio
import json
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from grpc import StatusCode
from grpc.aio import AioRpcError
from tritonclient import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.load.clients import LONG, served_together
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.sampling import SamplingParams
from triton_repo import client as client_command
from triton_repo import serve as serve_command
from triton_repo.client import request_inputs, stream, stream_async
from triton_repo.config import MODEL, TOKENS_MODEL
from triton_repo.process import ServerProcess, free_ports
from triton_repo.server import write_repository
from triton_repo.tensors import TEXT

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 150)
NUM_ROWS, MAX_WAITING = 4, 64
PATIENCE = 120
ROOT = Path(__file__).resolve().parents[2]


class Server(ServerProcess):
    """A running server, and ways to ask it."""

    def __init__(self, bundle: Path, log: Path, *options: str):
        rows = ["--max-num-seqs", str(NUM_ROWS), "--max-queue-size", str(MAX_WAITING), "--num-nodes", "6"]
        super().__init__(bundle, log, "--threads", "1", *rows, *options)

    def ask(self, **options: Any) -> list[dict[str, Any]]:
        """All responses of one request over gRPC."""
        with grpc.InferenceServerClient(self.url) as client:
            model = TOKENS_MODEL if "input_ids" in options else MODEL
            return list(stream(client, {"max_tokens": 24, "stream": True, **options}, model=model))

    def text(self, **options: Any) -> str:
        return b"".join(response["text_output"][0] for response in self.ask(**options)).decode()

    def post(self, body: bytes, path: str = "generate") -> bytes:
        url = f"http://localhost:{self.http_port}/v2/models/ctc_llm/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=PATIENCE) as answer:
            return bytes(answer.read())

    def counter(self, name: str) -> float:
        url = f"http://localhost:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [line.split()[-1] for line in lines if line.startswith(f'{name}{{model="ctc_llm"')]
        return float(value)


@pytest.fixture(scope="module")
def server(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tiny_bundle_dir, tmp_path_factory.mktemp("server") / "log", "--tokens")
    yield found
    assert found.stop() == 0


@pytest.fixture(scope="module")
def decoder(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="vanilla", num_threads=1)


def expected_text(decoder: SpeculativeDecoder, text: str, count: int = 24, **sampling: Any) -> str:
    prompt = decoder.prompt_tokenizer.encode(text)
    chunks = decoder.stream(prompt, max_new_tokens=count, sampling=SamplingParams(**sampling))
    return "".join(chunk.text for chunk in chunks)


def sampling_of(index: int) -> dict[str, Any]:
    """Every other request samples."""
    return {"temperature": 0.75, "top_k": 40, "seed": index} if index % 2 else {}


def test_the_runtime_s_text_one_by_one_and_together(server: Server, decoder: SpeculativeDecoder) -> None:
    requests = [(PROMPTS[index % len(PROMPTS)], sampling_of(index)) for index in range(64)]
    expected = [expected_text(decoder, text, **sampling) for text, sampling in requests]

    def over_grpc(request: tuple[str, dict[str, Any]]) -> str:
        return server.text(text_input=request[0], **request[1])

    def over_http(request: tuple[str, dict[str, Any]]) -> str:
        body = {"text_input": request[0], "max_tokens": 24, "stream": True, **request[1]}
        lines = server.post(json.dumps(body).encode(), "generate_stream").decode().splitlines()
        return "".join(json.loads(line[6:])["text_output"] for line in lines if line.startswith("data: "))

    assert [over_grpc(request) for request in requests] == expected
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(over_grpc, requests)) == expected
        assert list(pool.map(over_http, requests)) == expected


def test_one_response_without_streaming(server: Server, decoder: SpeculativeDecoder) -> None:
    (response,) = server.ask(text_input="How many?", stream=False, return_log_probs=True)
    assert response["text_output"][0].decode() == expected_text(decoder, "How many?")
    assert response["num_output_tokens"] == 24
    assert response["num_input_tokens"] == len(decoder.prompt_tokenizer.encode("How many?"))
    assert response["finish_reason"][0] == b"length"
    assert response["acceptance_length"] == pytest.approx(23 / response["num_steps"])
    assert response["output_log_probs"].shape == (24,)
    assert response["cum_log_probs"] == pytest.approx(response["output_log_probs"].sum(), rel=1e-5)
    generated = json.loads(server.post(b'{"text_input": "How many?", "max_tokens": 24}'))
    assert generated["text_output"] == expected_text(decoder, "How many?")


def test_options_over_the_wire(server: Server, decoder: SpeculativeDecoder) -> None:
    whole = server.text(text_input="How many?", max_tokens=40)
    stop_word = whole[5:8]
    stopped = server.text(text_input="How many?", max_tokens=40, stop_words=[stop_word])
    assert stopped == whole[: whole.find(stop_word)]
    assert server.text(text_input="How many?", max_tokens=40, stop_words=["", "\ue000", "ก" * 50]) == whole
    for streamed in (False, True):
        echoing = server.text(text_input="How many?", exclude_input_in_output=False, stream=streamed)
        assert echoing.startswith("How many?") is not streamed
    raw = decoder.stream(decoder.prompt_tokenizer.encode("How many?", raw=True), max_new_tokens=24)
    assert server.text(text_input="How many?", raw=True) == "".join(chunk.text for chunk in raw)
    (first,) = server.ask(text_input="x", max_tokens=1, logit_bias='{"77": 1000}', return_log_probs=True)
    assert first["text_output"][0].decode() == decoder.prompt_tokenizer.tokenizer.decode([77])


def test_a_client_of_tensorrt_llm(server: Server, decoder: SpeculativeDecoder) -> None:
    """What the TensorRT-LLM backend's own gRPC client sends, and how it reads the answer."""
    arrays: dict[str, Any] = {
        "text_input": np.array([["How many?"]]).astype(object),
        "max_tokens": np.array([[24]], np.int32),
        "stream": np.array([[True]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[0.0]], np.float32),
        "num_return_sequences": np.array([[1]], np.int32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "pad_id": np.array([[3]], np.int32),
        "return_log_probs": np.array([[True]]),
        "return_context_logits": np.array([[False]]),
        "exclude_input_in_output": np.array([[False]]),
    }
    inputs = []
    for name, array in arrays.items():
        tensor = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    outputs = [grpc.InferRequestedOutput(name) for name in ("text_output", "output_log_probs")]
    found: list[tuple[Any, Any]] = []
    with grpc.InferenceServerClient(server.url) as client:
        client.start_stream(callback=lambda result, error: found.append((result, error)))
        client.async_stream_infer(MODEL, inputs, outputs=outputs, request_id="1")
        client.stop_stream()
    assert [error for _, error in found if error is not None] == []
    texts = [result.as_numpy("text_output")[0].decode("utf-8") for result, _ in found]
    assert "".join(texts) == expected_text(decoder, "How many?")


def test_tokens_in_tokens_out(server: Server, decoder: SpeculativeDecoder) -> None:
    prompt = decoder.prompt_tokenizer.encode("How many?")
    responses = server.ask(input_ids=prompt)
    expected = [t for c in decoder.stream(prompt, max_new_tokens=24) for t in c.token_ids]
    assert np.concatenate([response["output_ids"] for response in responses]).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_input": ""}, "text_input: must not be empty"),
        ({"text_input": b"\xff\xfe"}, "text_input: must be UTF-8 text"),
        ({"text_input": "a" * 600}, "text_input: must be shorter than the context of 512 tokens"),
        ({"text_input": "a" * 1_000_000}, "of 512 tokens, got 1000000 characters"),
        ({"stop_words": ["a"] * 33}, "stop_words: must be at most 32, got 33"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens: must be at least 1"),
        ({"max_tokens": 4096}, "max_tokens: must be at most"),
        ({"temperature": -0.5}, "temperature: must be a number from 0 on, got -0.5"),
        ({"temperature": float("nan")}, "temperature: must be a number from 0 on, got nan"),
        ({"top_p": 0.0}, "top_p: must be above 0"),
        ({"beam_width": 4}, "beam_width: must be 1, got 4"),
        ({"logit_bias": '{"9999": 1}'}, "logit_bias: must be token ids below 258, got 9999"),
    ],
)
def test_bad_requests_name_the_tensor(server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        server.ask(**{"text_input": "x", **options})
    assert message in str(caught.value)


def test_wrong_tensors_are_refused(server: Server) -> None:
    """The server itself checks names, types and shapes."""

    def tensor(name: str, kind: str, array: Any) -> grpc.InferInput:
        found = grpc.InferInput(name, array.shape, kind)
        found.set_data_from_numpy(array)
        return found

    text = tensor("text_input", "BYTES", np.array([[b"x"]], np.object_))
    count = tensor("max_tokens", "INT32", np.array([[4]], np.int32))
    for inputs in (
        [count],
        [text],
        [text, count, tensor("nonsense", "INT32", np.array([[4]], np.int32))],
        [text, tensor("max_tokens", "FP32", np.array([[4]], np.float32))],
        [text, tensor("max_tokens", "INT32", np.array([[4, 5]], np.int32))],
        [text, tensor("max_tokens", "INT32", np.array([4], np.int32))],
    ):
        errors: list[Any] = []
        arrived = threading.Event()
        with grpc.InferenceServerClient(server.url) as client:

            def hear(result: Any, error: Any) -> None:
                errors.append(error)  # noqa: B023
                arrived.set()  # noqa: B023

            client.start_stream(callback=hear)
            client.async_stream_infer("ctc_llm", inputs)
            assert arrived.wait(PATIENCE)
        assert isinstance(errors[0], InferenceServerException)
    assert server.text(text_input="x")


def leave_grpc(server: Server, options: dict[str, Any]) -> None:
    with grpc.InferenceServerClient(server.url) as client:
        responses = stream(client, options)
        next(responses)
        responses.close()  # type: ignore[attr-defined]


def leave_http(server: Server, options: dict[str, Any]) -> None:
    url = f"http://localhost:{server.http_port}/v2/models/ctc_llm/generate_stream"
    request = urllib.request.Request(url, data=json.dumps(options).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        answer.readline()


@pytest.mark.parametrize("leave", [leave_grpc, leave_http])
def test_a_client_that_leaves_frees_its_row(
    server: Server, leave: Callable[[Server, dict[str, Any]], None]
) -> None:
    """It is not decoded to its end, and no row is lost: more leave than there are rows."""
    before, count, length = server.counter("ctc_tokens"), 2 * NUM_ROWS, LONG["max_tokens"]
    for _ in range(count):
        # Slow: every token is drawn from the whole vocabulary.
        leave(server, {**LONG, "text_input": "How many?", "temperature": 9.0})
    assert asyncio.run(served_together(server.url, NUM_ROWS))
    assert not asyncio.run(served_together(server.url, NUM_ROWS + 1))
    rest = (2 * NUM_ROWS + 1) * length
    assert server.counter("ctc_tokens") - before - rest < count * length / 2


def test_too_many_at_once_are_refused_at_once(server: Server, decoder: SpeculativeDecoder) -> None:
    expected = expected_text(decoder, "x", count=120)

    async def ask() -> tuple[str, float]:
        """The text or the error, and after how many seconds."""
        options, begin = {"text_input": "x", "max_tokens": 120, "stream": True}, time.monotonic()
        try:
            texts = [response["text_output"][0] async for response in stream_async(server.url, options)]
            found = b"".join(texts).decode()
        except InferenceServerException as error:
            found = str(error)
        return found, time.monotonic() - begin

    async def one_more() -> Any:
        """The status that a client gets which asks for one."""

        async def request() -> AsyncIterator[dict[str, Any]]:
            inputs = request_inputs(TEXT, {"text_input": "x", "max_tokens": 1})
            yield {"model_name": MODEL, "inputs": inputs}

        async with aio.InferenceServerClient(server.url) as client:
            try:
                async for _ in client.stream_infer(request(), headers={"triton_grpc_error": "true"}):
                    pass
            except AioRpcError as error:
                return error.code()

    async def all_at_once() -> list[tuple[str, float]]:
        tasks = [asyncio.create_task(ask()) for _ in range(count)]
        # The first to end is refused; the queue stays full until more than the rest of them have ended.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert await one_more() == StatusCode.UNAVAILABLE
        return await asyncio.gather(*tasks)

    count = 200
    found = asyncio.run(all_at_once())
    served = [text for text, _ in found if text == expected]
    refused = [after for text, after in found if "queue: must hold at most 64 requests, and is full" in text]
    assert len(served) + len(refused) == count
    assert len(served) >= MAX_WAITING
    # None of the refused has waited for others to be served.
    assert max(refused) < max(after for text, after in found if text == expected) / 2


@pytest.mark.parametrize(
    "path", ["systemsharedmemory/region/x/register", "trace/setting", "logging", "repository/models/x/load"]
)
def test_no_request_reaches_a_file(server: Server, path: str) -> None:
    body = {"key": "/x", "offset": 0, "byte_size": 8, "trace_file": "x", "log_file": "x"}
    request = urllib.request.Request(
        f"http://localhost:{server.http_port}/v2/{path}", data=json.dumps(body).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=PATIENCE)
    assert caught.value.code in (400, 403, 503)
    assert "restricted" in caught.value.read().decode() or path.startswith("repository")


def test_what_the_server_is_told() -> None:
    args, rest = serve_command.parse_args(["--bundle", "engines", "--grpc-use-ssl=true"])
    options = serve_command.server_options(args, rest)
    for kind in ("http", "grpc", "metrics"):
        assert f"--{kind}-address=127.0.0.1" in options
    assert "--model-control-mode=none" in options
    assert options[-1] == "--grpc-use-ssl=true"
    # Restrictions of the user's own are not mixed with ours.
    args, rest = serve_command.parse_args(["--bundle", "engines", "--http-restricted-api=trace:key=value"])
    options = serve_command.server_options(args, rest)
    assert sum(option.startswith("--http-restricted-api") for option in options) == 1


def test_the_deployment_s_probes(server: Server) -> None:
    deployment, _, _ = yaml.safe_load_all((ROOT / "triton_repo" / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        url = f"http://localhost:{server.http_port}{container[name]['httpGet']['path']}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            assert answer.status == 200


def test_metrics(server: Server) -> None:
    before = {
        name: server.counter(f"ctc_{name}") for name in ("requests", "tokens", "steps", "nodes", "accepted")
    }
    (*_, last) = server.ask(text_input="How many?")
    after = {name: server.counter(f"ctc_{name}") for name in before}
    steps = int(last["num_steps"][0])
    assert after["requests"] - before["requests"] == 1
    assert after["tokens"] - before["tokens"] == last["num_output_tokens"][0]
    assert after["steps"] - before["steps"] == steps
    assert steps <= after["nodes"] - before["nodes"] <= 7 * steps
    assert after["accepted"] - before["accepted"] <= 23


def test_the_client_command(
    server: Server, decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url
    assert client_command.main(["How many?", "--url", url, "--max-tokens", "24"]) == 0
    found = capsys.readouterr()
    assert found.out == expected_text(decoder, "How many?") + "\n"
    assert "24 tokens, first after" in found.err
    assert client_command.main(["", "--url", url]) == 2
    assert "client: text_input: must not be empty" in capsys.readouterr().err
    (port,) = free_ports(1)
    assert client_command.main(["x", "--url", f"localhost:{port}"]) == 2
    assert capsys.readouterr().err.startswith("client: ")


def test_a_restarted_server_serves_the_next_request(
    tiny_bundle_dir: Path, tmp_path: Path, decoder: SpeculativeDecoder
) -> None:
    first = Server(tiny_bundle_dir, tmp_path / "first")
    with grpc.InferenceServerClient(first.url) as client:
        responses = stream(client, {"text_input": "x", "max_tokens": 500, "stream": True})
        next(responses)
        subprocess.run(["pkill", "-KILL", "-P", str(first.process.pid)], check=True)
        with pytest.raises(InferenceServerException):
            list(responses)
    assert first.process.wait(PATIENCE) != 0
    second = Server(tiny_bundle_dir, tmp_path / "second")
    assert second.text(text_input="x") == expected_text(decoder, "x")
    assert second.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_requests_end_before_the_server_does(
    tiny_bundle_dir: Path, tmp_path: Path, decoder: SpeculativeDecoder, number: signal.Signals
) -> None:
    server = Server(tiny_bundle_dir, tmp_path / "log")
    with grpc.InferenceServerClient(server.url) as client:
        responses = stream(client, {"text_input": "x", "max_tokens": 400, "stream": True})
        first = next(responses)
        server.process.send_signal(number)
        rest = list(responses)
    text = b"".join(response["text_output"][0] for response in [first, *rest]).decode()
    assert text == expected_text(decoder, "x", count=400)
    assert server.process.wait(PATIENCE) == 0


def test_two_instances_give_the_same_texts(
    tiny_bundle_dir: Path, decoder: SpeculativeDecoder, tmp_path: Path
) -> None:
    server = Server(tiny_bundle_dir, tmp_path / "log", "--num-instances", "2")
    try:
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda text: server.text(text_input=text), PROMPTS))
        assert texts == [expected_text(decoder, text) for text in PROMPTS]
        # Both count: Triton gives them requests in turns.
        assert server.counter("ctc_requests") == len(PROMPTS)
    finally:
        assert server.stop() == 0


FAILING_MODEL = """
from triton_repo import backend


class Sender:
    # Has no room for the third response.

    def __init__(self, sender):
        self.sender, self.count = sender, 0
        self.is_cancelled = sender.is_cancelled

    def send(self, *args, **options):
        self.count += 1
        if self.count == 3:
            raise MemoryError("no room")
        self.sender.send(*args, **options)


class TritonPythonModel(backend.TritonPythonModel):
    def _submit(self, request, sender):
        super()._submit(request, Sender(sender))
"""


def test_an_answer_that_cannot_be_sent_ends_with_an_error(
    server: Server, tiny_bundle_dir: Path, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    write_repository(others, [TOKENS_MODEL], {"bundle": str(tiny_bundle_dir), "num_threads": "1"})
    (others / TOKENS_MODEL / "1" / "model.py").write_text(FAILING_MODEL)
    failing = Server(tiny_bundle_dir, tmp_path / "log", f"--model-repository={others}")
    for _ in range(2):
        with pytest.raises(InferenceServerException, match="the answer cannot be sent: MemoryError"):
            failing.ask(input_ids=[5, 6], max_tokens=100)
    assert failing.text(text_input="x") == server.text(text_input="x")
    assert failing.stop() == 0


def test_a_damaged_engine_is_not_served(tiny_bundle_dir: Path, tmp_path: Path) -> None:
    """The model says why; others keep serving."""
    damaged = Path(shutil.copytree(tiny_bundle_dir, tmp_path / "damaged"))
    path = damaged / "backbone.onnx.data"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    others = tmp_path / "others"
    write_repository(others, [TOKENS_MODEL], {"bundle": str(tiny_bundle_dir), "num_threads": "1"})
    server = Server(damaged, tmp_path / "log", f"--model-repository={others}")
    assert "sha256 differs" in server.log.read_text()
    with pytest.raises(urllib.error.HTTPError):
        server.post(b'{"text_input": "x", "max_tokens": 4}')
    assert not server.is_ready
    assert server.ask(input_ids=[5, 6], max_tokens=4)[-1]["num_output_tokens"] == [4]
    server.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bundle", "absent"], "absent is no engine bundle"),
        (["--bundle", "absent", "--max-num-seqs", "0"], "--max-num-seqs: must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command.main(arguments) == 2
    assert f"serve: {message}" in capsys.readouterr().err


def test_gpus_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve_command.main(["--bundle", "absent", "--gpus", "0,all"])
    assert "--gpus: must be GPU numbers such as 0,1, got '0,all'" in capsys.readouterr().err
