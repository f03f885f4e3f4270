"""Web applications in front of a Triton server, and what they know of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from triton_repo.triton.grpc_client import CONNECTION_ENDED, connect, read_failure
from triton_repo.triton.health import Health
from triton_repo.triton.tensors import CANCELLED
from triton_repo.web.access import ALLOWED, Access, Handler, Refuse, middlewares, send_event
from triton_repo.web.json_body import MAX_BODY_BYTES
from triton_repo.web.request_log import RECORD, log_requests

CLIENT = web.AppKey("client", aio.InferenceServerClient)
HEALTH = web.AppKey("health", Health)
# The address of Triton's own metrics.
METRICS = web.AppKey("metrics", str)
SERVED: web.AppKey[Sequence[str]] = web.AppKey("served")
# A Triton server that does not answer within so many seconds is not ready.
READY_SECONDS = 5.0
# When a connection to Triton has ended, the launcher knows why within this time.
SETTLE_SECONDS = 0.3


@dataclass(frozen=True)
class Launcher:
    """What the launcher of Triton gives to the applications in its process.

    client: a connection to Triton
    metrics_address: of Triton's own metrics
    columns: the heading of every model that the page asks
    models: our models that are served
    """

    client: aio.InferenceServerClient
    health: Health
    metrics_address: str
    columns: Mapping[str, str]
    models: Sequence[str]

    def attach(self, app: web.Application) -> None:
        app[CLIENT], app[HEALTH], app[METRICS] = self.client, self.health, self.metrics_address
        app[SERVED] = self.models


class NotReadyError(UserError):
    """The models cannot serve at the moment."""

    status = 503


def make_app(
    access: Access,
    refuse: Refuse,
    open_paths: Collection[str],
    triton: Launcher | str,
    max_bytes: int = MAX_BODY_BYTES,
) -> web.Application:
    """An application that logs its requests and answers every error in the form of its interface.

    access, open_paths: who may ask, and what needs no key
    refuse: makes the answer of an error
    triton: the launcher, if it runs in this process, or else Triton's gRPC address
    max_bytes: of a body
    """
    app = web.Application(
        client_max_size=max_bytes,
        middlewares=[*middlewares(access, refuse, open_paths), _count_requests, _with_errors(refuse)],
    )
    log_requests(app)
    if isinstance(triton, Launcher):
        triton.attach(app)
        return app
    url = triton

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with connect(url) as client:
            app[CLIENT] = client
            yield

    app[HEALTH] = Health(problem=None)
    app.cleanup_ctx.append(connected)
    return app


@web.middleware
async def _count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the requests for text, to whose end a server that stops waits."""
    if request.method != "POST":
        return await handler(request)
    with request.app[HEALTH].request():
        return await handler(request)


def _with_errors(refuse: Refuse) -> Any:
    """A middleware that answers errors. Those of requests have the status 400 if they name no other."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except UserError as error:
            return refuse(getattr(error, "status", 400), error)
        except web.HTTPException as error:
            message = error.text or error.reason
            if message.startswith(f"{error.status}: "):  # of aiohttp: no such address, method or size
                message = f"{request.method} {request.path}: {message}"
            return refuse(error.status, UserError(message))
        except InferenceServerException as error:
            return refuse(*await failure_of(error, request))

    return answer


@asynccontextmanager
async def events(
    request: web.Request, form: Callable[[int, UserError], dict[str, Any]]
) -> AsyncIterator[web.StreamResponse]:
    """Answer with the events that are sent in the block. An error of Triton there becomes the last of them.

    form: makes the event of an error, of its HTTP status and message
    """
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    response, record = web.StreamResponse(headers={**headers, **request.get(ALLOWED, {})}), request[RECORD]
    with suppress(ConnectionResetError):  # a client that has left is noticed at the first event
        await response.prepare(request)
    try:
        try:
            yield response
        except InferenceServerException as error:
            status, found = await failure_of(error, request)
            record.fail(status)
            await send_event(response, form(status, found))
        await response.write_eof()
    except ConnectionResetError:
        record.reason = CANCELLED


def check_serving(request: web.Request, model: str) -> None:
    """Raises NotReadyError where the launcher knows that the model cannot serve."""
    problem = request.app[HEALTH].problem_of(model)
    if problem is not None:
        raise NotReadyError(problem)


async def check_ready(request: web.Request, model: str) -> None:
    """Raises NotReadyError if the model is not ready or Triton cannot be reached."""
    check_serving(request, model)
    try:
        ready = await request.app[CLIENT].is_model_ready(model, client_timeout=READY_SECONDS)
    except InferenceServerException as error:
        raise NotReadyError(error.message()) from error
    if not ready:
        raise NotReadyError(f"{model} is not ready")


async def failure_of(error: InferenceServerException, request: web.Request) -> tuple[int, UserError]:
    """The HTTP status and the message of a Triton error: the launcher's, if it knows why Triton failed."""
    status, found = read_failure(error)
    health = request.app[HEALTH]
    if health.problem is None and found.problem.startswith(CONNECTION_ENDED):
        await asyncio.sleep(SETTLE_SECONDS)
    if found.field is None and health.problem is not None:
        return 503, UserError(health.problem)
    return status, found


async def metrics(request: web.Request) -> web.StreamResponse:
    """Triton's metrics, and those of our models."""
    try:
        async with (
            ClientSession(timeout=ClientTimeout(READY_SECONDS)) as session,
            session.get(request.app[METRICS]) as answer,
        ):
            return web.Response(body=await answer.read(), status=answer.status, content_type="text/plain")
    except (ClientError, TimeoutError) as error:
        raise web.HTTPServiceUnavailable(text="the metrics cannot be read: Triton does not answer") from error


def metrics_app(launcher: Launcher) -> web.Application:
    """An application that has metrics alone."""
    app = web.Application()
    log_requests(app)
    launcher.attach(app)
    app.router.add_get("/metrics", metrics)
    return app
