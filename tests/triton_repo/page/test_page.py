"""The page: its errors, its events, and what a real browser shows."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from aiohttp import ClientError, ClientSession
from aiohttp.test_utils import TestClient, TestServer

from runtime.core.errors import RequestError
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import PATIENCE, Server, expected_text
from triton_repo.page import __main__ as page
from triton_repo.page import app as page_app
from triton_repo.triton.process import free_ports
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL

QUESTION = "How many?"
JSON = {"Content-Type": "application/json"}
COLUMNS = {MODEL: page_app.DRAFTED}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def expected(decoder: SpeculativeDecoder) -> str:
    return expected_text(decoder, QUESTION)


def ask(url: str, body: bytes) -> tuple[int, str]:
    """The status and the text that a new page answers to one question."""

    async def run() -> tuple[int, str]:
        async with TestClient(TestServer(page_app.make_app(url))) as client:
            response = await client.post("/stream", data=body, headers=JSON)
            return response.status, await response.text()

    return asyncio.run(run())


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


@pytest.mark.parametrize("model", [MODEL, PLAIN_MODEL])
def test_both_columns_stream_the_same(server: Server, expected: str, model: str) -> None:
    body = json.dumps({"model": model, "text_input": QUESTION, "max_tokens": 24}).encode()
    status, text = ask(server.url, body)
    assert status == 200
    responses = events(text)
    assert "".join(event["text"] for event in responses) == expected
    assert responses[-1]["tokens"] == 24
    assert len(responses) == responses[-1]["steps"] + 1
    assert (responses[-1]["steps"] == 23) == (model == PLAIN_MODEL) or responses[-1]["steps"] < 24


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("nonsense", "Expecting value"),
        (b"\xff", "can't decode byte 0xff"),
        ('{"text_input": "\\ud800"}', "text_input: must be valid Unicode, got a lone surrogate"),
        ("[]", "body: must be a JSON object"),
        ('{"model": "other", "text_input": "x"}', 'model: must be ctc_llm or ctc_llm_plain, got "other"'),
        ("{}", "text_input: must be text, got null"),
        ('{"text_input": "x", "max_tokens": 0}', "max_tokens: must be a whole number of at least 1, got 0"),
        ('{"text_input": "x", "max_tokens": true}', "max_tokens: must be a whole number"),
    ],
)
def test_bad_questions(body: str | bytes, message: str) -> None:
    status, text = ask("localhost:1", body.encode() if isinstance(body, str) else body)
    assert status == 400
    assert message in text


def test_errors_of_the_server_are_shown(server: Server) -> None:
    (event,) = events(ask(server.url, b'{"text_input": " "}')[1])
    assert "text_input: must not be empty" in event["error"]
    (port,) = free_ports(1)
    (event,) = events(ask(f"localhost:{port}", b'{"text_input": "x"}')[1])
    assert "error" in event


def test_pages_of_other_origins() -> None:
    """They may not ask, not even by a name that stands for this machine, as after DNS rebinding."""

    async def run(host: str, origin: str) -> tuple[int, str]:
        async with TestClient(TestServer(page_app.make_app("localhost:1"))) as client:
            headers = {**JSON, "Host": host, "Origin": origin}
            response = await client.post("/stream", data=b"{}", headers=headers)
            return response.status, await response.text()

    assert asyncio.run(run("localhost:8080", "http://localhost:8080"))[0] == 400
    for host in ("localhost:8080", "other.example:8080"):
        status, text = asyncio.run(run(host, "http://other.example:8080"))
        assert (status, text) == (403, "pages of other origins may not ask this server")


def test_the_page_of_the_launcher(server: Server, expected: str) -> None:
    """It is on the port of OpenAI's interface, whose errors have another form."""

    async def run() -> tuple[str, Any, str, Any]:
        async with ClientSession(f"http://localhost:{server.openai_port}") as session:
            html = await (await session.get("/")).text()
            columns = await (await session.get("/columns")).json()
            body = {"model": PLAIN_MODEL, "text_input": QUESTION, "max_tokens": 24}
            stream = await (await session.post("/stream", json=body)).text()
            return html, columns, stream, await (await session.post("/stream", json={"model": "x"})).json()

    html, columns, stream, wrong = asyncio.run(run())
    assert html == page_app.PAGE.read_text(encoding="utf-8")
    headings = {MODEL: page_app.DRAFTED, PLAIN_MODEL: page_app.PLAIN}
    assert columns == {"columns": headings, "needs_key": False}
    assert "".join(event["text"] for event in events(stream)) == expected
    assert wrong["error"]["message"] == 'model: must be ctc_llm or ctc_llm_plain, got "x"'


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], server: Server) -> None:
    assert page.main(["--url", server.url, "--port", str(server.http_port)]) == 2
    assert f"page: --port {server.http_port}:" in capsys.readouterr().err


def test_fields() -> None:
    assert page_app.read_question({"text_input": "x"}, COLUMNS)[0] == MODEL
    with pytest.raises(RequestError, match="max_tokens"):
        page_app.read_question({"text_input": "x", "max_tokens": 2**31}, COLUMNS)
    wrong: list[Any] = [PLAIN_MODEL, [], None]
    for model in wrong:
        with pytest.raises(RequestError, match="model: must be ctc_llm, got"):
            page_app.read_question({"text_input": "x", "model": model}, COLUMNS)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize("is_launchers", [False, True])
def test_the_page_in_a_browser(server: Server, expected: str, tmp_path: Path, is_launchers: bool) -> None:
    """What the page of the command and that of the launcher show when both answers have come."""
    port, debug_port = free_ports(2)
    command = [sys.executable, "-m", "triton_repo.page", "--url", server.url, "--port", str(port)]
    asked = server.openai_port if is_launchers else port
    query = urlencode({"prompt": QUESTION, "count": 24, "run": ""})
    browser = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
    ]
    browser += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    browser += [f"--user-data-dir={tmp_path}", f"--remote-debugging-port={debug_port}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as page,
        subprocess.Popen([*browser, "about:blank"], stderr=subprocess.DEVNULL) as chromium,
    ):
        try:
            assert page.stdout is not None
            assert "open http://" in page.stdout.readline()
            shown = asyncio.run(text_on_page(debug_port, f"http://localhost:{asked}/?{query}"))
        finally:
            page.terminate()
            chromium.terminate()
    assert shown["verdict"].startswith("The same text, ")
    assert shown["texts"] == [expected, expected]
    assert all(numbers.startswith("24 tokens, ") for numbers in shown["numbers"])


async def text_on_page(debug_port: int, url: str) -> dict[str, Any]:
    """Open the page over the browser's debugging protocol and wait for its verdict."""
    script = """({
        verdict: document.getElementById("verdict")?.textContent ?? "",
        texts: [...document.querySelectorAll(".text")].map((element) => element.textContent),
        numbers: [...document.querySelectorAll(".numbers")].map((element) => element.textContent),
    })"""
    end = time.monotonic() + PATIENCE
    async with ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://localhost:{debug_port}/json") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                address = tabs[0]["webSocketDebuggerUrl"]
                break
            except (ClientError, IndexError):
                assert time.monotonic() < end, "the browser does not answer"
                await asyncio.sleep(0.1)
        async with session.ws_connect(address) as socket:
            await socket.send_json({"id": 1, "method": "Page.navigate", "params": {"url": url}})
            shown: dict[str, Any] = {"verdict": ""}
            while not shown["verdict"]:
                assert time.monotonic() < end, shown
                await asyncio.sleep(0.1)
                params = {"expression": script, "returnByValue": True}
                await socket.send_json({"id": 2, "method": "Runtime.evaluate", "params": params})
                while (message := await socket.receive_json()).get("id") != 2:
                    pass
                # While the page is being opened, the answer is an error or has no value.
                shown = message.get("result", {}).get("result", {}).get("value", shown)
    return shown
