"""The page itself, and its questions as streams of events, for an application of its own or another one."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from aiohttp import web
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import encode_utf8
from triton_repo.triton.grpc_client import connect, stream_over
from triton_repo.triton.health import Health
from triton_repo.triton.tensors import CANCELLED, MODEL, PLAIN_MODEL
from triton_repo.web.access import NO_LIMITS, begin_events, middlewares, send_event
from triton_repo.web.backend import CLIENT, HEALTH, check_serving, failure_of
from triton_repo.web.json_body import MediaTypeError, read_json, shown
from triton_repo.web.request_log import RECORD, log_requests

PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 1 << 20
# What needs no key: without questions the page costs nothing.
OPEN_PATHS = ("/", "/columns")
# The heading of every model's column.
COLUMNS: web.AppKey[Mapping[str, str]] = web.AppKey("columns")
DRAFTED, PLAIN = "With the draft head", "Plain decoding"
NEEDS_KEY = web.AppKey("needs_key", bool)


def make_app(url: str) -> web.Application:
    """An application of the page alone. url: Triton's gRPC address."""

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with connect(url) as client:
            app[CLIENT] = client
            yield

    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=middlewares(NO_LIMITS, _refuse, OPEN_PATHS)
    )
    log_requests(app)
    app[HEALTH] = Health(problem=None)
    app.cleanup_ctx.append(connected)
    add_page(app, {MODEL: DRAFTED, PLAIN_MODEL: PLAIN}, needs_key=False)
    return app


def _refuse(status: int, error: UserError) -> web.Response:
    """The answer to a page of another origin. The option that the error names is not one of this command."""
    return web.Response(text="pages of other origins may not ask this server", status=status)


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
    try:
        model, options = read_question(await read_json(request), request.app[COLUMNS])
        check_serving(request, model)
    except MediaTypeError as error:
        raise web.HTTPUnsupportedMediaType(text=str(error)) from error
    except RequestError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    except UserError as error:
        raise web.HTTPServiceUnavailable(text=str(error)) from error
    response = await begin_events(request)
    record = request[RECORD]
    try:
        async with aclosing(stream_over(request.app[CLIENT], options, model=model)) as responses:
            async for outputs in responses:
                record.add(outputs)
                event = {
                    "text": outputs["text_output"][0].decode(),
                    "tokens": int(outputs["num_output_tokens"][0]),
                    "steps": int(outputs["num_steps"][0]),
                }
                await send_event(response, event)
    except InferenceServerException as error:
        status, found = await failure_of(error, request)
        record.fail(status)
        await send_event(response, {"error": str(found)})
    except ConnectionResetError:
        record.reason = CANCELLED
        return response
    await response.write_eof()
    return response


def read_question(body: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The model and the request options of a question. Raises RequestError that names the wrong field."""
    model = body.get("model", MODEL)
    if not isinstance(model, str) or model not in columns:
        raise RequestError(f"must be {' or '.join(columns)}, got {shown(model)}", field="model")
    text, count = body.get("text_input"), body.get("max_tokens", 256)
    if not isinstance(text, str):
        raise RequestError(f"must be text, got {shown(text)}", field="text_input")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 2**31:
        raise RequestError(f"must be a whole number of at least 1, got {shown(count)}", field="max_tokens")
    return model, {"text_input": encode_utf8("text_input", text), "max_tokens": count, "stream": True}
