"""OpenAI's interface over HTTP, in front of a Triton model."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from triton_repo.openai.bodies import (
    CHAT,
    COMPLETION,
    Answer,
    Form,
    OpenAIRequest,
    read_chat,
    read_completion,
    shown,
)
from triton_repo.triton.grpc_client import stream_over
from triton_repo.triton.tensors import TEXT, inputs_of

CHAT_PATH, HEALTH_PATH = "/v1/chat/completions", "/health"
MAX_BODY_BYTES = 8 << 20
# A Triton model that does not answer within so many seconds is not ready.
READY_SECONDS = 5.0
# After the first error of several Triton requests, the others are cancelled after so many seconds.
REFUSAL_SECONDS = 0.2
# Messages may have any size. Attempts to reach a Triton server that was stopped are at most a second apart;
# without the option it would be two minutes.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# The inputs that errors of a Triton model name.
INPUTS = {info.name for info in inputs_of(TEXT)}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class UnknownModelError(RequestError):
    """A request asks for a model that is not served here."""


@dataclass(frozen=True)
class Service:
    """What is served.

    url: Triton's gRPC address
    model, name: Triton's name of the model, and the one that clients use
    api_key: what clients have to send as a bearer token; None for nothing
    origins: pages that may ask from a browser, such as https://chat.example; "*" stands for all
    """

    url: str
    model: str
    name: str
    api_key: str | None = None
    origins: frozenset[str] = frozenset()


SERVICE = web.AppKey("service", Service)
CLIENT = web.AppKey("client", aio.InferenceServerClient)
# Of a request of a page: the headers that let the browser read the answer.
ALLOWED = web.RequestKey("allowed", dict)


def make_app(service: Service) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_from_browsers, _errors, _with_key])
    app[SERVICE] = service
    app.cleanup_ctx.append(_connect)
    app.add_routes(
        [
            web.get(HEALTH_PATH, _health),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name:.+}", _model),
            web.post(CHAT_PATH, _chat),
            web.post("/v1/completions", _completion),
        ]
    )
    return app


async def _connect(app: web.Application) -> AsyncIterator[None]:
    """One connection for all requests: a new one would delay every first token by milliseconds."""
    async with aio.InferenceServerClient(app[SERVICE].url, channel_args=CHANNEL) as client:
        app[CLIENT] = client
        yield


async def _health(request: web.Request) -> web.StreamResponse:
    """200 if the model is ready, 503 if it is not or Triton cannot be reached."""
    try:
        model = request.app[SERVICE].model
        ready = await request.app[CLIENT].is_model_ready(model, client_timeout=READY_SECONDS)
    except InferenceServerException:
        ready = False
    return web.Response(status=200 if ready else 503)


async def _models(request: web.Request) -> web.StreamResponse:
    return web.json_response({"object": "list", "data": [_described(request.app[SERVICE])]})


async def _model(request: web.Request) -> web.StreamResponse:
    _check_name(request, request.match_info["name"])
    return web.json_response(_described(request.app[SERVICE]))


def _described(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "ctc-speculator"}


def _check_name(request: web.Request, name: Any) -> None:
    """Raises UnknownModelError for a model that is not served."""
    served = request.app[SERVICE].name
    if name != served:
        raise UnknownModelError(f"must be {served}, got {shown(name)}", field="model")


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _respond(request, CHAT, read_chat(await _body(request)))


async def _completion(request: web.Request) -> web.StreamResponse:
    return await _respond(request, COMPLETION, read_completion(await _body(request)))


async def _body(request: web.Request) -> dict[str, Any]:
    """The body, which asks for the model that is served. Raises RequestError, UnknownModelError."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise RequestError(f"must be JSON: {error}", field="body") from error
    except (LookupError, web.RequestPayloadError) as error:
        raise RequestError(
            f"must be text in the charset and the encoding of its headers: {shown(str(error))}", field="body"
        ) from error
    if not isinstance(body, dict):
        raise RequestError("must be a JSON object", field="body")
    if body.get("model") is None:
        raise RequestError(f"is missing; this server has {request.app[SERVICE].name}", field="model")
    _check_name(request, body["model"])
    return body


async def _respond(request: web.Request, form: Form, openai_request: OpenAIRequest) -> web.StreamResponse:
    """Answer at once or with server-sent events. Errors before the first event have an HTTP status."""
    service = request.app[SERVICE]
    answer = Answer(form, f"{form.prefix}-{uuid.uuid4().hex}", int(time.time()), service.name, openai_request)
    async with aclosing(_outputs(request.app[CLIENT], service.model, openai_request.inputs)) as outputs:
        if not openai_request.stream:
            async for index, tensors in outputs:
                answer.add(index, tensors)
            return web.json_response(answer.whole())
        first = await anext(outputs)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                **request.get(ALLOWED, {}),
            }
        )
        await response.prepare(request)
        try:
            for event in (*answer.begin(), *answer.events(*first)):
                await _send(response, event)
            async for index, tensors in outputs:
                for event in answer.events(index, tensors):
                    await _send(response, event)
            for event in answer.end():
                await _send(response, event)
            await response.write(b"data: [DONE]\n\n")
        except InferenceServerException as error:
            await _send(response, _error(*_failure(error, request.path)))
        except ConnectionResetError:  # the client left
            return response
        await response.write_eof()
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


async def _outputs(
    client: aio.InferenceServerClient, model: str, inputs: Sequence[dict[str, Any]]
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """The responses to several Triton requests as they come, each with the request's index.

    Raises the first error. Requests that have not ended by then, or when it is closed, are cancelled.
    """
    queue: asyncio.Queue[tuple[int, dict[str, Any] | BaseException | None]] = asyncio.Queue()
    running = set(range(len(inputs)))

    async def ask(index: int) -> None:
        try:
            async for tensors in stream_over(client, inputs[index], model=model):
                if tensors["finish_reason"][0]:
                    # Its stream is read to its end (docs/serving.md).
                    running.discard(index)
                queue.put_nowait((index, tensors))
            queue.put_nowait((index, None))
        except Exception as error:
            running.discard(index)
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(ask(index)) for index in range(len(inputs))]
    try:
        ended = 0
        while ended < len(tasks):
            index, item = await queue.get()
            if isinstance(item, BaseException):
                # A full queue refuses them together. A stream that is cancelled as it ends may stay in Triton
                # (docs/serving.md), so those that were refused too get time to end.
                await asyncio.wait(tasks, timeout=REFUSAL_SECONDS)
                raise item
            if item is None:
                ended += 1
            else:
                yield index, item
    finally:
        for index in running:
            tasks[index].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's form."""
    try:
        return await handler(request)
    except RequestError as error:
        return _error_response(404 if isinstance(error, UnknownModelError) else 400, error)
    except web.HTTPException as error:
        message = error.text or error.reason
        if message.startswith(f"{error.status}: "):  # of aiohttp: no such address, method or size
            message = f"{request.method} {request.path}: {message}"
        return _error_response(error.status, UserError(message))
    except InferenceServerException as error:
        return _error_response(*_failure(error, request.path))


@web.middleware
async def _with_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses requests without the key, if there is one. Health is open, for those who watch it."""
    key = request.app[SERVICE].api_key
    if key is not None and request.path != HEALTH_PATH:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        # Bytes that are not UTF-8, in a header or in the environment, are surrogates here.
        if not hmac.compare_digest(*(text.encode("utf-8", "surrogateescape") for text in (given, key))):
            error = UserError("a valid key is expected in the header Authorization, as: Bearer KEY")
            return web.json_response(_error(401, error), status=401, headers={"WWW-Authenticate": "Bearer"})
    return await handler(request)


@web.middleware
async def _from_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers pages of other origins only if they are allowed, so that no page can spend compute unseen.

    A browser names the page's origin in every such request, and asks before one with JSON or a key.
    """
    origin = request.headers.get("Origin")
    if origin is None:
        return await handler(request)
    origins = request.app[SERVICE].origins
    if "*" not in origins and origin not in origins:
        message = f"pages of {shown(origin)} may not ask this server; --allow-origin lets them"
        return web.json_response(_error(403, UserError(message)), status=403)
    allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    if request.method == "OPTIONS":
        asked = request.headers.get("Access-Control-Request-Headers", "")
        allowed |= {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": asked}
        return web.Response(status=204, headers=allowed)
    request[ALLOWED] = allowed
    response = await handler(request)
    if not response.prepared:
        response.headers.update(allowed)
    return response


def _error_response(status: int, error: UserError) -> web.Response:
    return web.json_response(_error(status, error), status=status)


def _failure(error: InferenceServerException, path: str) -> tuple[int, UserError]:
    """The HTTP status and the message of a Triton error, with OpenAI's name of the field.

    A stream's errors have no status of Triton's: 2.51 may crash if it is asked for one (docs/serving.md). An
    error that names an input is the client's. Of the others most are a full queue, a server that stops or
    one that cannot be reached, so that another attempt may succeed.
    """
    found = UserError.of_text(error.message(), INPUTS)
    if found.field is None:
        return 500 if found.problem.startswith("internal error") else 503, found
    prompt = "messages" if path == CHAT_PATH else "prompt"
    names = {"stop_words": "stop", "text_input": prompt, "template_options": "chat_template_kwargs"}
    return 400, UserError(found.problem, field=names.get(found.field, found.field))


def _error(status: int, error: UserError) -> dict[str, Any]:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        503: "overloaded_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": None}}
