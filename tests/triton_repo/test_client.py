"""The gRPC client: what it imports, sends and prints."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    with pytest.raises(RequestError, match="text_input: must be valid Unicode, got a lone surrogate at 1"):
        grpc_client.request_inputs(TEXT, {"text_input": "a\ud800"})


def test_the_command(server: Server, decoder: SpeculativeDecoder, capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["How many?", "--url", server.url, "--max-tokens", "24"]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected_text(decoder, "How many?") + "\n"
    assert "24 tokens, first after" in printed.err
    assert client.main(["How many?", "--system", "Be brief.", "--url", server.url, "--max-tokens", "24"]) == 0
    ids = decoder.prompt_tokenizer.encode_prompt(Prompt("How many?").with_system("Be brief."))
    answered = "".join(chunk.text for chunk in decoder.stream(ids, max_new_tokens=24))
    assert capsys.readouterr().out == answered + "\n" != printed.out
    assert client.main(["", "--url", server.url]) == 2
    assert "client: text_input: must not be empty" in capsys.readouterr().err
    (port,) = free_ports(1)
    assert client.main(["x", "--url", f"localhost:{port}"]) == 2
    expected = f"client: --url: no server at localhost:{port} serves ctc_llm: "
    assert capsys.readouterr().err.startswith(expected)
