"""Serve aiohttp applications."""

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from runtime.core.cli import Terminated
from runtime.core.errors import UserError
from triton_repo.triton.server import DRAIN_SECONDS

# Connections without a request are closed at once when a server ends; the others get this long.
END_SECONDS = 2.0


def listen(app: web.Application, host: str, port: int, ready: str, tls: ssl.SSLContext | None = None) -> None:
    """Serve an application on this address until the command is stopped; print the line ``ready`` first.

    Running requests then have ``DRAIN_SECONDS`` to end; a second signal ends them. A handler whose client
    leaves is cancelled. Raises UserError for an address that cannot be listened on.
    """
    asyncio.run(_listen(app, host, port, ready, tls))


async def _listen(app: web.Application, host: str, port: int, ready: str, tls: ssl.SSLContext | None) -> None:
    # aiohttp waits so long twice: for handlers, and once more after it has ended their requests' bodies.
    async with listening(host, {"--port": (port, app)}, tls, DRAIN_SECONDS / 2):
        print(ready, flush=True)
        try:
            await terminated()
        finally:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


async def terminated() -> None:
    """Wait for SIGTERM, and raise Terminated then. The main thread alone can do this.

    As ``exit_status`` raises it, it would end whatever runs in the loop. Callbacks of grpc swallow it: the
    server would go on, with a stream that waits for ever.
    """
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    raise Terminated


@asynccontextmanager
async def listening(
    host: str,
    apps: Mapping[str, tuple[int, web.Application]],
    tls: ssl.SSLContext | None = None,
    end_seconds: float = END_SECONDS,
) -> AsyncIterator[None]:
    """Serve applications inside the block.

    apps: the port and the application of every option that chooses a port
    tls: the certificate of all of them; None for none
    end_seconds: half of the time that running requests have to end after the block
    """
    logging.getLogger("aiohttp.server").addFilter(_is_ours)
    runners = []
    try:
        for option, (port, app) in apps.items():
            # Where aiohttp decompresses bodies, it writes a traceback to the log for every false one.
            runner = web.AppRunner(
                app, handler_cancellation=True, auto_decompress=False, shutdown_timeout=end_seconds
            )
            runners.append(runner)
            await runner.setup()
            try:
                await web.TCPSite(runner, host, port, ssl_context=tls).start()
            except (OSError, OverflowError) as error:  # OverflowError: no such port
                problem = getattr(error, "strerror", None) or str(error)
                raise UserError(problem, field=f"{option} {port}") from error
        yield
    finally:
        for runner in runners:
            await runner.cleanup()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of aiohttp's is about more than a client that does not speak HTTP, and is told so."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
