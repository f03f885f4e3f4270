"""``generate``, ``generate_stream``, health and metrics over HTTP, in front of Triton's models.

The addresses are those of Triton, whose own HTTP port is closed: one deeply nested body ends Triton 2.51.

JSON of ``generate`` becomes inputs of a Triton model, and its outputs JSON, as Triton's own HTTP does it.
"""

import math
from collections.abc import Mapping
from contextlib import aclosing
from typing import Annotated, Any

import numpy as np
from aiohttp import web
from msgspec import Meta

from runtime.core.errors import RequestError, UserError
from triton_repo.triton.grpc_client import stream_over
from triton_repo.triton.tensors import LEAST_LOG_PROB, MODELS, TensorInfo, inputs_of
from triton_repo.web import backend
from triton_repo.web.access import Access, retry_after, send_event
from triton_repo.web.backend import (
    CLIENT,
    HEALTH,
    SERVED,
    Launcher,
    check_ready,
    check_serving,
    events,
    metrics,
)
from triton_repo.web.json_body import BOOL, Kind, read_json, shown
from triton_repo.web.request_log import RECORD

# What a value of each type may be. The range of the largest numbers is checked where tensors are made.
KINDS = {
    "TYPE_STRING": Kind(str, "a string"),
    "TYPE_BOOL": BOOL,
    "TYPE_FP32": Kind(Annotated[float, Meta(gt=-3.4e38, lt=3.4e38)], "a number"),
    "TYPE_INT32": Kind(Annotated[int, Meta(ge=-(2**31), lt=2**31)], "a whole number of 32 bits"),
    "TYPE_UINT64": Kind(int, "a whole number between 0 and 2^64 - 1"),
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


def _value(info: TensorInfo, value: Any) -> list[Any]:
    kind, words = KINDS[info.triton_type]
    words = words if info.size == 1 else f"{words}, or a list of them"
    values = value if isinstance(value, list) else [value]
    if info.size == 1 and len(values) != 1:
        raise RequestError(f"must be {words}, got {shown(value)}", field=info.name)
    return [Kind(kind, words).read(info.name, each) for each in values]


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
    app = backend.make_app(access, _refuse, open_paths, launcher)
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
        first = await anext(responses)
        request[RECORD].add(first)
        async with events(request, lambda _, error: {"error": str(error)}) as response:
            await send_event(response, write_outputs(model, first))
            async for outputs in responses:
                request[RECORD].add(outputs)
                await send_event(response, write_outputs(model, outputs))
        return response


def _model_name(request: web.Request, *, is_ours: bool = False) -> str:
    """The model of a request: one that is served, or of a repository of the user's unless it has to be ours.

    Raises HTTPNotFound.
    """
    model, served = request.match_info["model"], request.app[SERVED]
    if model not in served and (is_ours or model in MODELS):
        text = f"model: must be one of {', '.join(served)}, got {shown(model)}"
        raise web.HTTPNotFound(text=text)
    return model


async def _read(request: web.Request) -> tuple[str, dict[str, Any]]:
    """The model and the inputs of a request. Raises RequestError, NotReadyError."""
    model = _model_name(request, is_ours=True)
    check_serving(request, model)
    return model, read_inputs(MODELS[model], await read_json(request, also=(CURL_TYPE,)))


def _refuse(status: int, error: UserError) -> web.Response:
    return web.json_response({"error": str(error)}, status=status, headers=retry_after(status))
