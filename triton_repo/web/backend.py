"""What a web application knows of the Triton server behind it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from runtime.core.errors import UserError
from triton_repo.triton.grpc_client import CONNECTION_ENDED, read_failure
from triton_repo.triton.health import Health
from triton_repo.web.access import Handler
from triton_repo.web.request_log import log_requests

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


@web.middleware
async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts the requests for text, to whose end a server that stops waits."""
    if request.method != "POST":
        return await handler(request)
    with request.app[HEALTH].request():
        return await handler(request)


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
