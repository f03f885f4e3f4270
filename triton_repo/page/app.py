"""The page itself, and its questions as streams of events, for an application of its own or another one."""

from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import encode_utf8
from triton_repo.triton.grpc_client import stream_over
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL
from triton_repo.web import backend
from triton_repo.web.access import NO_LIMITS, send_event
from triton_repo.web.backend import CLIENT, check_serving, events
from triton_repo.web.json_body import TEXT, Kind, read_json, shown
from triton_repo.web.request_log import RECORD

PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 1 << 20
COUNT = Kind(Annotated[int, Meta(ge=1, lt=2**31)], "a whole number of at least 1")
# What needs no key: without questions the page costs nothing.
OPEN_PATHS = ("/", "/columns")
# The heading of every model's column.
COLUMNS: web.AppKey[Mapping[str, str]] = web.AppKey("columns")
DRAFTED, PLAIN = "With the draft head", "Plain decoding"
NEEDS_KEY = web.AppKey("needs_key", bool)


def make_app(url: str) -> web.Application:
    """An application of the page alone. url: Triton's gRPC address."""
    app = backend.make_app(NO_LIMITS, _refuse, OPEN_PATHS, url, MAX_BODY_BYTES)
    add_page(app, {MODEL: DRAFTED, PLAIN_MODEL: PLAIN}, needs_key=False)
    return app


def _refuse(status: int, error: UserError) -> web.Response:
    """An error as a text. The option that names other origins is not one of this command."""
    text = "pages of other origins may not ask this server" if status == 403 else str(error)
    return web.Response(text=text, status=status)


def add_page(app: web.Application, columns: Mapping[str, str], *, needs_key: bool) -> None:
    """Add the page to an application that has a connection to Triton.

    columns: the heading of every model that can be asked
    needs_key: whether questions need the application's key
    """
    app[COLUMNS] = dict(columns)
    app[NEEDS_KEY] = needs_key
    app.add_routes([web.get("/", _page), web.get("/columns", _columns), web.post("/stream", _stream)])


async def _page(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(PAGE)


async def _columns(request: web.Request) -> web.StreamResponse:
    return web.json_response({"columns": request.app[COLUMNS], "needs_key": request.app[NEEDS_KEY]})


async def _stream(request: web.Request) -> web.StreamResponse:
    """Answer with server-sent events: ``{"text", "tokens", "steps"}`` for every response, or ``{"error"}``.

    When the browser leaves the page, aiohttp cancels this handler, which cancels the request.
    """
    model, options = read_question(await read_json(request), request.app[COLUMNS])
    check_serving(request, model)
    async with (
        events(request, lambda _, error: {"error": str(error)}) as response,
        aclosing(stream_over(request.app[CLIENT], options, model=model)) as responses,
    ):
        async for outputs in responses:
            request[RECORD].add(outputs)
            event = {
                "text": outputs["text_output"][0].decode(),
                "tokens": int(outputs["num_output_tokens"][0]),
                "steps": int(outputs["num_steps"][0]),
            }
            await send_event(response, event)
    return response


def read_question(body: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The model and the request options of a question. Raises RequestError that names the wrong field."""
    model = body.get("model", MODEL)
    if not isinstance(model, str) or model not in columns:
        raise RequestError(f"must be {' or '.join(columns)}, got {shown(model)}", field="model")
    text = TEXT.read("text_input", body.get("text_input"))
    count = COUNT.read("max_tokens", body.get("max_tokens", 256))
    return model, {"text_input": encode_utf8("text_input", text), "max_tokens": count, "stream": True}
