"""The gRPC client: what it imports, sends and prints."""

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import Prompt
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import Server, expected_text
from triton_repo import client
from triton_repo.triton import grpc_client
from triton_repo.triton.process import free_ports
from triton_repo.triton.tensors import TEXT

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import sys, triton_repo.{}
print([name for name in sys.modules if name.startswith(("onnxruntime", "numba", "tokenizers"))])
"""


@pytest.mark.parametrize(
    "module",
    ["client", "openai.app", "openai.server", "page.__main__", "page.app", "serve", "triton.process"],
)
def test_no_engine_is_imported(module: str) -> None:
    command = [sys.executable, "-c", IMPORT.format(module)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed == "[]\n"


def test_inputs() -> None:
    (text, words) = grpc_client.request_inputs(TEXT, {"text_input": "Ünï", "stop_words": ["a", b"b"]})
    assert (text.name(), text.datatype(), text.shape()) == ("text_input", "BYTES", [1, 1])
    assert (words.name(), words.datatype(), words.shape()) == ("stop_words", "BYTES", [1, 2])
    with pytest.raises(UserError, match="nonsense: is no input of this model; it has text_input"):
        grpc_client.request_inputs(TEXT, {"nonsense": 1})
    for name, number in (("seed", -1), ("seed", 2**64), ("max_tokens", 2**32 + 5)):
        with pytest.raises(RequestError, match=rf"{name}: must be between .* and .*, got {number}"):
            grpc_client.request_inputs(TEXT, {name: number})
    with pytest.raises(RequestError, match="text_input: must be valid Unicode, got a lone surrogate at 1"):
        grpc_client.request_inputs(TEXT, {"text_input": "a\ud800"})


@pytest.mark.parametrize(
    ("url", "is_near"),
    [
        *(("localhost:8001", True), ("127.0.0.1:1", True), ("[::1]:8001", True)),
        *(("192.168.1.5:8001", False), ("triton.example:8001", False), ("[::1", False)),
    ],
)
def test_no_proxy_stands_before_this_machine(url: str, is_near: bool) -> None:
    option = ("grpc.enable_http_proxy", 0)
    assert (option in grpc_client.channel_args(url)) == is_near
    assert option in grpc_client.channel_args(url, is_own=True)


def test_a_proxy_of_the_environment(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def is_live() -> bool:
        async with grpc_client.connect(own_server.url) as connection:
            return bool(await connection.is_server_live(client_timeout=grpc_client.CONNECT_TIMEOUT))

    assert asyncio.run(is_live())


def test_the_status_of_a_failure() -> None:
    """Only what another attempt may mend is 503."""
    for message, status in (
        ("internal error: KeyError(3)", 500),
        ("the queue is full", 503),
        ("seed: no", 400),
    ):
        assert grpc_client.read_failure(InferenceServerException(message))[0] == status
    absent = InferenceServerException("name: must be another", grpc_client.NOT_FOUND)
    assert grpc_client.read_failure(absent)[0] == 404


def test_the_command(
    server: Server,
    decoder: SpeculativeDecoder,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert client.main(["How many?", "--url", server.url, "--max-tokens", "24"]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected_text(decoder, "How many?") + "\n"
    assert "24 tokens, first after" in printed.err
    assert client.main(["How many?", "--system", "Be brief.", "--url", server.url, "--max-tokens", "24"]) == 0
    ids = decoder.prompt_tokenizer.encode_prompt(Prompt("How many?").with_system("Be brief."))
    answered = "".join(chunk.text for chunk in decoder.stream(ids, max_new_tokens=24))
    assert capsys.readouterr().out == answered + "\n" != printed.out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert client.main(["-", "--url", server.url]) == 2
    assert capsys.readouterr().err == "client: --prompt: stdin is not UTF-8 (byte 0)\n"
    assert client.main(["", "--url", server.url]) == 2
    assert "client: text_input: must not be empty" in capsys.readouterr().err
    for flag, value, problem in (
        ("--max-tokens", "100000", "must be at most"),
        ("--temperature", "-1", "must be a number from 0 on, got -1"),
        ("--seed", "-1", "must be between 0 and 18446744073709551615, got -1"),
    ):
        assert client.main(["x", "--url", server.url, f"{flag}={value}"]) == 2
        assert f"client: {flag}: {problem}" in capsys.readouterr().err
    (port,) = free_ports(1)
    assert client.main(["x", "--url", f"localhost:{port}"]) == 2
    expected = f"client: --url: no server at localhost:{port} serves ctc_llm: "
    assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--max-tokens=0", "--max-tokens: must be a whole number between 1 and 2147483647, got '0'"),
        ("--max-tokens=2147483648", "--max-tokens: must be a whole number between 1 and 2147483647, got '21"),
        ("--stop=", "--stop: must not be empty"),
    ],
)
def test_bad_options(option: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        client.main(["x", option])
    assert f"client: {problem}" in capsys.readouterr().err
