"""Servers of one application, as ``ctc openai`` and ``ctc page`` run them."""

import asyncio
import os
import signal
import threading
import time
import urllib.error
import urllib.request

import pytest
from aiohttp import web

from runtime.core.cli import EXIT_TERMINATED, exit_status
from triton_repo.triton.process import free_ports
from triton_repo.web.server import listen


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

    def ask() -> None:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}").close()
                return
            except urllib.error.URLError:  # it does not listen yet
                time.sleep(0.01)

    threading.Thread(target=ask, daemon=True).start()

    def serve() -> int:
        listen(app, "127.0.0.1", port, "ready")
        return 0

    assert exit_status("test", serve) == EXIT_TERMINATED
    assert swallowed == []
    assert capsys.readouterr() == ("ready\n", "test: interrupted\n")
