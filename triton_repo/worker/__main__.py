"""Serve a model repository without Triton. ``ctc serve`` starts this process and watches it.

    python -m triton_repo.worker --model-repository models/ --grpc-port 8001 --metrics-port 8002

The options have the names of tritonserver's. All models run in this process, each with a thread that decodes;
another thread answers gRPC in Triton's protocol, and metrics over HTTP. A model that cannot be loaded is
reported, and the others are served.
"""

import argparse
import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.core.cli import Parser, exit_status, port
from runtime.core.errors import UserError

if TYPE_CHECKING:
    from triton_repo.triton.metrics import Registry
    from triton_repo.worker.service import Model

LOGGER = logging.getLogger(__name__)
# Of one message: more than the largest request that is taken, so that its error can name the input.
MAX_MESSAGE_BYTES = 64 << 20


def main(argv: list[str] | None = None) -> int:
    parser = Parser("worker", "triton_repo.worker", __doc__)
    text = "directory with a model in each of its directories"
    parser.add_argument("--model-repository", type=Path, required=True, help=text)
    parser.add_argument("--grpc-address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--grpc-port", type=port, default=8001, help="default %(default)s")
    parser.add_argument("--metrics-address", default="127.0.0.1", help="the same for the metrics")
    parser.add_argument("--metrics-port", type=port, default=8002, help="default %(default)s")
    args = parser.parse_args(argv)
    return exit_status("worker", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    from triton_repo.triton.metrics import Registry

    logging.basicConfig()
    registry = Registry()
    models = load_models(args.model_repository, registry)
    asyncio.run(_serve(args, models, registry))
    return 0


def load_models(repository: Path, registry: "Registry") -> "dict[str, Model]":
    """The models of a repository by name, one after the other. One that fails is there with the reason."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    from triton_repo.triton.model import ServedModel
    from triton_repo.worker.service import VERSION, Model

    models: dict[str, Model] = {}
    for path in sorted(repository.glob("*/config.pbtxt")):
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
        group = config.instance_group[0]
        args = {
            "model_name": config.name,
            "model_version": VERSION,
            "model_instance_kind": group.Kind.Name(group.kind).removeprefix("KIND_"),
            "model_instance_device_id": str(group.gpus[0]) if group.gpus else "0",
        }
        as_json = json_format.MessageToDict(config, preserving_proto_field_name=True)
        try:
            models[config.name] = Model(config, ServedModel(as_json, args, registry.family))
        except Exception as error:
            if not isinstance(error, UserError):
                LOGGER.exception("%s did not load", config.name)
            models[config.name] = Model(config, None, str(error))
    if not models:
        raise UserError(f"has no model with a config.pbtxt: {repository}", field="--model-repository")
    return models


async def _serve(args: argparse.Namespace, models: "dict[str, Model]", registry: "Registry") -> None:
    import grpc
    from aiohttp import web
    from tritonclient.grpc import service_pb2_grpc

    from triton_repo.triton.metrics import CONTENT_TYPE
    from triton_repo.triton.server import in_address
    from triton_repo.web.server import listening, terminated
    from triton_repo.worker.service import InferenceService

    async def metrics(request: web.Request) -> web.Response:
        for model in models.values():
            if model.served is not None:
                model.served.metrics.flush()
        return web.Response(text=registry.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would get each other's requests.
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceService(models), server)
    try:
        server.add_insecure_port(f"{in_address(args.grpc_address)}:{args.grpc_port}")
    except RuntimeError as error:
        raise UserError(str(error), field=f"--grpc-port {args.grpc_port}") from error
    async with listening(args.metrics_address, {"--metrics-port": (args.metrics_port, app)}):
        await server.start()
        try:
            await terminated()
        finally:
            await server.stop(None)


if __name__ == "__main__":
    raise SystemExit(main())
