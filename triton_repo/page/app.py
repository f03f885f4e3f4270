"""The server of the page: the page itself, and its questions as streams of events."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import encode_utf8
from triton_repo.triton.grpc_client import stream_async
from triton_repo.triton.tensors import MODEL, PLAIN_MODEL
from triton_repo.web.json_body import read_json

PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 1 << 20
URL = web.AppKey("url", str)


def make_app(url: str) -> web.Application:
    """The page's application. url: Triton's gRPC address."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[URL] = url
    app.add_routes([web.get("/", _page), web.post("/stream", _stream)])
    return app


async def _page(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(PAGE)


async def _stream(request: web.Request) -> web.StreamResponse:
    """Answer with server-sent events: ``{"text", "tokens", "steps"}`` for every response, or ``{"error"}``.

    When the browser leaves the page, aiohttp cancels this handler, which cancels the request.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
    try:
        model, options = read_question(await read_json(request))
    except UserError as error:
        raise web.HTTPBadRequest(text=str(error)) from error
    await response.prepare(request)
    try:
        async for outputs in stream_async(request.app[URL], options, model=model):
            await _send(
                response,
                text=outputs["text_output"][0].decode(),
                tokens=int(outputs["num_output_tokens"][0]),
                steps=int(outputs["num_steps"][0]),
            )
    except InferenceServerException as error:
        await _send(response, error=error.message())
    except ConnectionResetError:
        return response
    await response.write_eof()
    return response


async def _send(response: web.StreamResponse, **event: Any) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def read_question(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model and the request options of a question. Raises RequestError that names the wrong field."""
    model = body.get("model", MODEL)
    if model not in (MODEL, PLAIN_MODEL):
        raise RequestError(f"must be {MODEL} or {PLAIN_MODEL}, got {model!r}", field="model")
    text, count = body.get("text_input"), body.get("max_tokens", 256)
    if not isinstance(text, str):
        raise RequestError(f"must be text, got {text!r}", field="text_input")
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 2**31:
        raise RequestError(f"must be a whole number of at least 1, got {count!r}", field="max_tokens")
    return model, {"text_input": encode_utf8("text_input", text), "max_tokens": count, "stream": True}
