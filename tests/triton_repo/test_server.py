"""The real tritonserver with a tiny bundle: the runtime's text, and a clear error for every fault."""

import asyncio
import json
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from runtime.decoder import SpeculativeDecoder
from runtime.sampling import SamplingParams
from triton_repo import client as client_command
from triton_repo import serve as serve_command
from triton_repo.client import stream, stream_async
from triton_repo.config import MODEL, TOKENS_MODEL
from triton_repo.process import ServerProcess, free_ports
from triton_repo.server import write_repository

PROMPTS = ("How many?", "What is the sum of 12 and 30?", "x", "Ünïcödé ✓ text", "Why not?", "a" * 150)
NUM_ROWS, MAX_WAITING = 4, 64
PATIENCE = 120
ROOT = Path(__file__).resolve().parents[2]


class Server(ServerProcess):
    """A running server, and ways to ask it."""

    def __init__(self, bundle: Path, log: Path, *options: str):
        rows = ["--num-rows", str(NUM_ROWS), "--max-waiting", str(MAX_WAITING), "--num-nodes", "6"]
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
    assert server.text(text_input="How many?", exclude_input_in_output=False).startswith("How many?")
    raw = decoder.stream(decoder.prompt_tokenizer.encode("How many?", raw=True), max_new_tokens=24)
    assert server.text(text_input="How many?", raw=True) == "".join(chunk.text for chunk in raw)
    (first,) = server.ask(text_input="x", max_tokens=1, logit_bias='{"77": 1000}', return_log_probs=True)
    assert first["text_output"][0].decode() == decoder.prompt_tokenizer.tokenizer.decode([77])


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
        ({"text_input": "a" * 1_000_000}, "text_input: must be shorter than the context of 512 tokens"),
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


def test_a_client_that_leaves_frees_its_row(server: Server) -> None:
    """A row that was not given back would be missing here: more leave than there are rows."""
    for _ in range(2 * NUM_ROWS):
        with grpc.InferenceServerClient(server.url) as client:
            responses = stream(client, {"text_input": "x", "max_tokens": 500, "stream": True})
            next(responses)
            responses.close()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(NUM_ROWS) as pool:
        texts = list(pool.map(lambda _: server.text(text_input="x"), range(NUM_ROWS)))
    assert len(set(texts)) == 1


def test_too_many_at_once_are_refused_at_once(server: Server, decoder: SpeculativeDecoder) -> None:
    expected = expected_text(decoder, "x", count=120)

    async def ask() -> str:
        options = {"text_input": "x", "max_tokens": 120, "stream": True}
        try:
            texts = [response["text_output"][0] async for response in stream_async(server.url, options)]
        except InferenceServerException as error:
            return str(error)
        return b"".join(texts).decode()

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(ask() for _ in range(count)))

    count = 200
    found = asyncio.run(all_at_once())
    served = [text for text in found if text == expected]
    refused = [text for text in found if "queue: must hold at most 64 requests, and is full" in text]
    assert len(served) + len(refused) == count
    assert len(served) >= NUM_ROWS
    assert refused


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


def test_running_requests_end_before_the_server_does(
    tiny_bundle_dir: Path, tmp_path: Path, decoder: SpeculativeDecoder
) -> None:
    server = Server(tiny_bundle_dir, tmp_path / "log")
    with grpc.InferenceServerClient(server.url) as client:
        responses = stream(client, {"text_input": "x", "max_tokens": 400, "stream": True})
        first = next(responses)
        server.process.send_signal(signal.SIGTERM)
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
        (["--bundle", "absent", "--num-rows", "0"], "--num-rows: must be at least 1, got 0"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_command.main(arguments) == 2
    assert f"serve: {message}" in capsys.readouterr().err


def test_gpus_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve_command.main(["--bundle", "absent", "--gpus", "0,all"])
    assert "--gpus: must be GPU numbers such as 0,1, got '0,all'" in capsys.readouterr().err
