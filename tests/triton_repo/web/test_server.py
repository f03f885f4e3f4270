"""Servers of one application, as ``ctc openai`` and ``ctc page`` run them."""

import asyncio
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from aiohttp import web

from runtime.core.cli import EXIT_TERMINATED, exit_status
from triton_repo.triton.process import free_ports
from triton_repo.web.server import END_SECONDS, listen


def get(port: int) -> bytes:
    """The answer of a server that may not listen yet."""
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}") as answer:
                return bytes(answer.read())
        except urllib.error.URLError:
            time.sleep(0.01)


def test_sigterm_ends_a_server_whatever_runs_in_its_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """It comes in a callback that swallows what is raised in it, as those of grpc do."""
    swallowed: list[BaseException] = []

    def stop() -> None:
        raise KeyboardInterrupt

    async def callback(request: web.Request) -> web.Response:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            swallowed.append(error)
            asyncio.get_running_loop().call_soon(stop)
        return web.Response()

    (port,) = free_ports(1)
    app = web.Application()
    app.router.add_get("/", callback)
    threading.Thread(target=get, args=(port,), daemon=True).start()

    def serve() -> int:
        listen(app, "127.0.0.1", port, "ready")
        return 0

    assert exit_status("test", serve) == EXIT_TERMINATED
    assert swallowed == []
    assert capsys.readouterr() == ("ready\n", "test: interrupted\n")


def test_a_running_request_ends_before_the_server() -> None:
    """A stream that takes longer than connections without a request get."""

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first, ")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(2 * END_SECONDS + 0.5)
        await response.write(b"last")
        return response

    (port,) = free_ports(1)
    app = web.Application()
    app.router.add_get("/", stream)

    def serve() -> int:
        listen(app, "127.0.0.1", port, "ready")
        return 0

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, port)
        assert exit_status("test", serve) == EXIT_TERMINATED
        assert answer.result() == b"first, last"
