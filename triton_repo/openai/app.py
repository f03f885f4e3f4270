"""OpenAI's interface over HTTP, in front of a Triton model, and beside it a launcher's page and metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from triton_repo.openai.answers import CHAT, COMPLETION, Answer
from triton_repo.openai.bodies import OpenAIRequest, read_chat, read_completion
from triton_repo.openai.responses import RESPONSE, ResponseAnswer, read_response, response_field
from triton_repo.openai.tool_calls import ToolForm
from triton_repo.openai.tools import TOOLS
from triton_repo.page.app import OPEN_PATHS, add_page
from triton_repo.triton.grpc_client import stream_over
from triton_repo.web import backend
from triton_repo.web.access import NO_LIMITS, Access, retry_after, send_event
from triton_repo.web.backend import CLIENT, Launcher, check_ready, check_serving, events, failure_of, metrics
from triton_repo.web.json_body import read_json, shown
from triton_repo.web.request_log import RECORD

CHAT_PATH, COMPLETION_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/completions", "/v1/responses"
METRICS_PATH = "/metrics"
HEALTH_PATHS = ("/health", "/ready")
# After the first error of several Triton requests, the others are cancelled after so many seconds.
REFUSAL_SECONDS = 0.2


class UnknownModelError(RequestError):
    """A request asks for a model that is not served here."""

    status = 404


@dataclass(frozen=True)
class Service:
    """What is served.

    url: Triton's gRPC address
    model, name: Triton's name of the model, and the one that clients use
    access: who may ask
    tool_form: how the model writes calls of tools; None if that is not known
    """

    url: str
    model: str
    name: str
    access: Access = NO_LIMITS
    tool_form: ToolForm | None = None


SERVICE = web.AppKey("service", Service)


def make_app(service: Service, launcher: Launcher | None = None) -> web.Application:
    """The application. launcher: that of Triton, if it runs in this process"""
    open_paths = (*HEALTH_PATHS, METRICS_PATH, *OPEN_PATHS)
    app = backend.make_app(service.access, _error_response, open_paths, launcher or service.url)
    app[SERVICE] = service
    if launcher is not None:
        app.router.add_get(METRICS_PATH, metrics)
        add_page(app, launcher.columns, needs_key=service.access.api_key is not None)
    app.add_routes(
        [
            *(web.get(path, _health) for path in HEALTH_PATHS),
            web.get("/v1/models", _models),
            web.get("/v1/models/{name:.+}", _model),
            web.post(CHAT_PATH, _chat),
            web.post(RESPONSES_PATH, _response),
            web.post(COMPLETION_PATH, _completion),
        ]
    )
    return app


async def _health(request: web.Request) -> web.StreamResponse:
    """200 if the model is ready, 503 with the reason if it is not or Triton cannot be reached."""
    await check_ready(request, request.app[SERVICE].model)
    return web.Response()


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
    body = await _body(request)
    return await _answer(request, partial(Answer, CHAT), read_chat(body, request.app[SERVICE].tool_form))


async def _response(request: web.Request) -> web.StreamResponse:
    asked, repeated = read_response(await _body(request), request.app[SERVICE].tool_form)
    return await _answer(request, partial(ResponseAnswer, RESPONSE, repeated=repeated), asked)


async def _completion(request: web.Request) -> web.StreamResponse:
    return await _answer(request, partial(Answer, COMPLETION), read_completion(await _body(request)))


async def _body(request: web.Request) -> dict[str, Any]:
    """The body, which asks for the model that is served. Raises RequestError, UnknownModelError."""
    body = await read_json(request)
    if body.get("model") is None:
        raise RequestError(f"is missing; this server has {request.app[SERVICE].name}", field="model")
    _check_name(request, body["model"])
    return body


async def _answer(
    request: web.Request, make_answer: Callable[..., Answer], asked: OpenAIRequest
) -> web.StreamResponse:
    """Answer at once or with server-sent events. Errors before the first of them have an HTTP status.

    make_answer: of the time, the model's name and the request
    """
    service = request.app[SERVICE]
    check_serving(request, service.model)
    answer = make_answer(created=int(time.time()), model=service.name, request=asked)
    record = request[RECORD]
    record.identifier = answer.identifier
    try:
        async with aclosing(_outputs(request.app[CLIENT], service.model, asked.inputs)) as outputs:
            if not asked.stream:
                async for index, tensors in outputs:
                    record.add(tensors, index)
                    answer.add(index, tensors)
                return web.json_response(answer.whole())
            first = await anext(outputs)
            record.add(first[1], first[0])

            def form(status: int, error: UserError) -> dict[str, Any]:
                return answer.error(_error(status, _renamed(error, request, asked)))

            async with events(request, form) as response:
                for event in (*answer.begin(), *answer.events(*first)):
                    await send_event(response, event)
                async for index, tensors in outputs:
                    record.add(tensors, index)
                    for event in answer.events(index, tensors):
                        await send_event(response, event)
                for event in answer.end():
                    await send_event(response, event)
                if answer.form.has_end_mark:
                    await response.write(b"data: [DONE]\n\n")
            return response
    except InferenceServerException as error:
        status, found = await failure_of(error, request)
        return _error_response(status, _renamed(found, request, asked))


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


def _error_response(status: int, error: UserError) -> web.Response:
    return web.json_response(_error(status, error), status=status, headers=retry_after(status))


def _renamed(found: UserError, request: web.Request, asked: OpenAIRequest) -> UserError:
    """An error of Triton's model with OpenAI's name of the field."""
    if found.field is None:
        return found
    prompt = "prompt" if request.path == COMPLETION_PATH else "messages"
    names = dict.fromkeys(("text_input", "input_ids", "messages"), prompt)
    names |= {"stop_words": "stop", "template_options": "chat_template_kwargs"}
    if asked.tools is not None:
        names["template_options"] = TOOLS
    if asked.guide_field is not None:
        names["guided_decoding_guide"] = asked.guide_field
    name: str | None = names.get(found.field, found.field)
    if request.path == RESPONSES_PATH:
        name = response_field(name)
    return UserError(found.problem, field=name)


def _error(status: int, error: UserError) -> dict[str, Any]:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        503: "overloaded_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": None}}
