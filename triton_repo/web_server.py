"""Serve an aiohttp application until the command is stopped."""

import asyncio

from aiohttp import web

from runtime.core.errors import UserError


def listen(app: web.Application, host: str, port: int, ready: str) -> None:
    """Serve an application on this address until the command is stopped; print the line ``ready`` first.

    A handler whose client leaves is cancelled. Raises UserError for an address that cannot be listened on.
    """
    try:
        asyncio.run(_listen(app, host, port, ready))
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        raise UserError(f"--port {port}: {getattr(error, 'strerror', None) or error}") from error


async def _listen(app: web.Application, host: str, port: int, ready: str) -> None:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        print(ready, flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
