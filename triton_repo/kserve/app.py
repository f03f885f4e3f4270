"""``generate``, ``generate_stream``, health and metrics over HTTP, in front of Triton's models.

The addresses are those of Triton, whose own HTTP port is closed: one deeply nested body ends Triton 2.51.

JSON of ``generate`` becomes inputs of a Triton model, and its outputs JSON, as Triton's own HTTP does it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
from aiohttp import web
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from triton_repo.triton.grpc_client import stream_over
from triton_repo.triton.tensors import CANCELLED, LEAST_LOG_PROB, MODELS, TensorInfo, inputs_of
from triton_repo.web.access import Access, Handler, begin_events, middlewares, retry_after, send_event
from triton_repo.web.backend import (
    CLIENT,
    HEALTH,
    SERVED,
    Launcher,
    NotReadyError,
    check_ready,
    check_serving,
    count_requests,
    failure_of,
    metrics,
)
from triton_repo.web.json_body import MAX_BODY_BYTES, MediaTypeError, read_json, shown
from triton_repo.web.request_log import RECORD, log_requests


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


# What a value of each type may be, in words and as a check.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "TYPE_STRING": ("a string", lambda value: isinstance(value, str)),
    "TYPE_BOOL": ("true or false", lambda value: isinstance(value, bool)),
    "TYPE_FP32": ("a number", lambda value: type(value) in (int, float) and abs(value) < 3.4e38),
    "TYPE_INT32": ("a whole number of 32 bits", _whole(-(2**31), 2**31 - 1)),
    "TYPE_UINT64": ("a whole number between 0 and 2^64 - 1", _whole(0, 2**64 - 1)),
}


def read_inputs(interface: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name. Fields that no input has are ignored, and so are those that are null.

    Raises RequestError for a value that is not of its input's type.
    """
    infos = {info.name: info for info in inputs_of(interface)}
    return {
        name: _value(infos[name], value)
        for name, value in body.items()
        if name in infos and value is not None
    }


def _value(info: TensorInfo, value: Any) -> Any:
    expected, is_one = KINDS[info.triton_type]
    values = value if isinstance(value, list) else [value]
    if all(map(is_one, values)) and (info.size == -1 or len(values) == 1):
        return values
    expected = expected if info.size == 1 else f"{expected}, or a list of them"
    raise RequestError(f"must be {expected}, got {shown(value)}", field=info.name)


def write_outputs(model: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A response's tensors as Triton writes them: one element as it is, several as a list."""
    lists = {name: [_written(value) for value in array] for name, array in outputs.items()}
    values = {name: each[0] if len(each) == 1 else each for name, each in lists.items()}
    return {"model_name": model, "model_version": "1", **values}


def _written(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if not isinstance(plain, float) or math.isfinite(plain) else LEAST_LOG_PROB


LIVE_PATH, READY_PATH, METRICS_PATH = "/v2/health/live", "/v2/health/ready", "/metrics"
MODEL_PATH = r"/v2/models/{model}{version:(/versions/1)?}"
# What curl declares a body to be unless it is told otherwise, as in the examples of Triton's documents.
CURL_TYPE = "application/x-www-form-urlencoded"


def make_app(launcher: Launcher, access: Access) -> web.Application:
    """The application. access: who may ask"""
    open_paths = (LIVE_PATH, READY_PATH, METRICS_PATH, *(f"/v2/models/{name}/ready" for name in MODELS))
    app = web.Application(
        client_max_size=MAX_BODY_BYTES,
        middlewares=[*middlewares(access, _refuse, open_paths), count_requests, _errors],
    )
    launcher.attach(app)
    log_requests(app)
    app.add_routes(
        [
            web.get(LIVE_PATH, _live),
            web.get(READY_PATH, _ready),
            web.get(METRICS_PATH, metrics),
            web.get("/v2", _server),
            web.get(MODEL_PATH, _model),
            web.get(f"{MODEL_PATH}/ready", _model_ready),
            web.post(f"{MODEL_PATH}/generate", _generate),
            web.post(f"{MODEL_PATH}/generate_stream", _generate_stream),
        ]
    )
    return app


async def _live(request: web.Request) -> web.StreamResponse:
    """200 as long as the launcher runs, which starts Triton anew if it fails."""
    return web.Response()


async def _ready(request: web.Request) -> web.StreamResponse:
    problem = request.app[HEALTH].any_problem
    return web.Response() if problem is None else _refuse(503, UserError(problem))


async def _model_ready(request: web.Request) -> web.StreamResponse:
    model = _model_name(request)
    if model not in request.app[SERVED]:
        check_serving(request, model)
        await request.app[CLIENT].get_model_metadata(model)  # raises if there is no such model
    await check_ready(request, model)
    return web.Response()


async def _server(request: web.Request) -> web.StreamResponse:
    return web.json_response(await request.app[CLIENT].get_server_metadata(as_json=True))


async def _model(request: web.Request) -> web.StreamResponse:
    """The names and types of a model's tensors."""
    name = _model_name(request)
    described = await request.app[CLIENT].get_model_metadata(name, as_json=True)
    for tensor in (*described["inputs"], *described["outputs"]):
        tensor["shape"] = [int(size) for size in tensor["shape"]]  # in JSON of gRPC they are strings
    return web.json_response(described)


async def _generate(request: web.Request) -> web.StreamResponse:
    """Answer with the one response of a request that does not stream."""
    model, inputs = await _read(request)
    if inputs.get("stream") == [True]:
        raise RequestError("must be false; generate_stream answers with many responses", field="stream")
    async with aclosing(stream_over(request.app[CLIENT], inputs, model=model)) as responses:
        outputs = await anext(responses)
        request[RECORD].add(outputs)
        async for _ in responses:
            pass
    return web.json_response(write_outputs(model, outputs))


async def _generate_stream(request: web.Request) -> web.StreamResponse:
    """Answer with server-sent events. An error before the first of them has an HTTP status."""
    model, inputs = await _read(request)
    async with aclosing(stream_over(request.app[CLIENT], inputs, model=model)) as responses:
        first, record = await anext(responses), request[RECORD]
        record.add(first)
        response = await begin_events(request)
        try:
            await send_event(response, write_outputs(model, first))
            try:
                async for outputs in responses:
                    record.add(outputs)
                    await send_event(response, write_outputs(model, outputs))
            except InferenceServerException as error:
                status, found = await failure_of(error, request)
                record.fail(status)
                await send_event(response, {"error": str(found)})
            await response.write_eof()
        except ConnectionResetError:
            record.reason = CANCELLED
        return response


def _model_name(request: web.Request) -> str:
    """The model of a request: one that is served, or of a repository of the user's. Raises HTTPNotFound."""
    model = request.match_info["model"]
    if model in MODELS and model not in request.app[SERVED]:
        raise _not_served(request)
    return model


def _not_served(request: web.Request) -> web.HTTPNotFound:
    served: Sequence[str] = request.app[SERVED]
    model = shown(request.match_info["model"])
    return web.HTTPNotFound(text=f"model: must be one of {', '.join(served)}, got {model}")


async def _read(request: web.Request) -> tuple[str, dict[str, Any]]:
    """The model and the inputs of a request. Raises RequestError, NotReadyError."""
    model = _model_name(request)
    if model not in MODELS:
        raise _not_served(request)
    check_serving(request, model)
    return model, read_inputs(MODELS[model], await read_json(request, also=(CURL_TYPE,)))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in Triton's form."""
    try:
        return await handler(request)
    except NotReadyError as error:
        return _refuse(503, error)
    except RequestError as error:
        return _refuse(400, error)
    except MediaTypeError as error:
        return _refuse(415, error)
    except web.HTTPException as error:
        return _refuse(error.status, UserError(error.text or error.reason))
    except InferenceServerException as error:
        return _refuse(*await failure_of(error, request))


def _refuse(status: int, error: UserError) -> web.Response:
    return web.json_response({"error": str(error)}, status=status, headers=retry_after(status))
