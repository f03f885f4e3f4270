"""Triton's gRPC protocol, answered by models in this process.

It has what our clients ask: streams of inference, liveness, readiness and descriptions. Nothing that loads or
unloads models, or opens files, is answered.

The protocol is the open inference protocol (https://kserve.github.io/website/latest/modelserving/data_plane):
the bytes of all inputs stand in ``raw_input_contents``, or each input's values in its own ``contents``.
"""

import asyncio
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from threading import Semaphore
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from runtime.core.errors import RequestError
from triton_repo.triton.model import ServedModel, Tensors
from triton_repo.triton.tensors import (
    CANCELLED,
    INTERNAL,
    INVALID,
    UNAVAILABLE,
    TensorInfo,
    inputs_of,
    outputs_of,
)

# The field of ``contents`` that holds the values of each type of our inputs.
CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
}


def read_tensors(request: Any) -> dict[str, NDArray[Any]]:
    """The tensors of a ``ModelInferRequest`` by name, each of shape (1, n).

    Raises RequestError that names the first wrong one.
    """
    num_raw = len(request.raw_input_contents)
    if num_raw not in (0, len(request.inputs)):
        message = f"must be as many as the {len(request.inputs)} inputs, got {num_raw}"
        raise RequestError(message, field="raw_input_contents")
    tensors: dict[str, NDArray[Any]] = {}
    for index, tensor in enumerate(request.inputs):
        name, shape = tensor.name, list(tensor.shape)
        if name in tensors:
            raise RequestError("must be given once", field=name)
        if tensor.datatype not in CONTENTS:
            raise RequestError(f"must be one of {', '.join(CONTENTS)}, got {tensor.datatype}", field=name)
        if "shared_memory_region" in tensor.parameters:
            raise RequestError("must be in the request; this server reads no shared memory", field=name)
        values = _raw(tensor, request.raw_input_contents[index]) if num_raw else _contents(tensor)
        if len(shape) != 2 or shape[0] != 1 or prod(shape) != values.size:
            problem = f"must have the shape [1, n] of its n values, got {shape} for {values.size}"
            raise RequestError(problem, field=name)
        tensors[name] = values.reshape(shape)
    return tensors


def _raw(tensor: Any, raw: bytes) -> NDArray[Any]:
    try:
        if tensor.datatype == "BYTES":
            return deserialize_bytes_tensor(raw)
        return np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
    except (struct.error, ValueError) as error:
        raise RequestError(f"cannot be read: {error}", field=tensor.name) from error


def _contents(tensor: Any) -> NDArray[Any]:
    values = getattr(tensor.contents, CONTENTS[tensor.datatype])
    return np.array(list(values), triton_to_np_dtype(tensor.datatype))


def write_response(request: Any, tensors: Tensors, *, is_last: bool) -> Any:
    """A ``ModelInferResponse``, with those of the tensors that its request asks for, or with all."""
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.parameters["triton_final_response"].bool_param = is_last
    wanted = {output.name for output in request.outputs} or tensors.keys()
    for name, array in tensors.items():
        if name in wanted:
            output = response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype))
            output.shape.extend(array.shape)
            is_text = array.dtype == np.object_ and array.size > 0
            written = serialize_byte_tensor(array).item() if is_text else array.tobytes()
            response.raw_output_contents.append(written)
    return response


NAME, VERSION = "ctc-speculator", "1"
# Requests that may wait until their prompts are tokenized: more than queues are long.
MAX_UNREAD = 1024
STATUS = {
    INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    CANCELLED: grpc.StatusCode.CANCELLED,
    INTERNAL: grpc.StatusCode.INTERNAL,
}
# Metadata by which a client asks for an error as its stream's status, as in Triton.
WANTS_STATUS = "triton_grpc_error"


@dataclass
class Model:
    """A model of the repository.

    served: None if it did not load, for the reason ``problem``
    places: of requests that may wait to be read by its intake
    """

    config: ModelConfig
    served: ServedModel | None
    problem: str = ""
    places: Semaphore = field(default_factory=lambda: Semaphore(MAX_UNREAD))

    @property
    def interface(self) -> str:
        return str(self.config.parameters["interface"].string_value)

    @property
    def is_ready(self) -> bool:
        return self.served is not None and self.served.is_ready

    def take(self, request: Any, sender: "Sender") -> None:
        """Have a request read and queued, unless the model did not load or too many wait to be read."""
        if self.served is None:
            sender.fail(UNAVAILABLE, f"{request.model_name} did not load: {self.problem}")
        elif not self.places.acquire(blocking=False):
            self.served.metrics.add_failure(UNAVAILABLE)
            sender.fail(UNAVAILABLE, f"queue: {MAX_UNREAD} requests wait to be read")
        else:
            self.served.intake.submit(self._read, self.served, request, sender)

    def _read(self, served: ServedModel, request: Any, sender: "Sender") -> None:
        try:
            served.take(partial(read_tensors, request), sender)
        finally:
            self.places.release()


class InferenceService(service_pb2_grpc.GRPCInferenceServiceServicer):
    """models: by name"""

    def __init__(self, models: Mapping[str, Model]):
        self._models = models

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=all(model.is_ready for model in self._models.values()))

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=(await self._model(request, context)).is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name=NAME, version=VERSION, extensions=["model_configuration"])

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        model = await self._model(request, context)
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform=model.config.backend,
            inputs=[_described(info) for info in inputs_of(model.interface)],
            outputs=[_described(info) for info in outputs_of(model.interface)],
        )

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        return pb.ModelConfigResponse(config=(await self._model(request, context)).config)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        response = pb.RepositoryIndexResponse()
        for name, model in self._models.items():
            state = "UNAVAILABLE" if model.served is None else "READY"
            response.models.add(name=name, version=VERSION, state=state, reason=model.problem)
        return response

    async def _refuse(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "is restricted: this server does not have it")

    ModelInfer = ModelStatistics = RepositoryModelLoad = RepositoryModelUnload = _refuse
    SystemSharedMemoryRegister = SystemSharedMemoryStatus = SystemSharedMemoryUnregister = _refuse
    CudaSharedMemoryRegister = CudaSharedMemoryStatus = CudaSharedMemoryUnregister = _refuse
    TraceSetting = LogSettings = _refuse

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> None:
        """Answer the requests of a stream as they come. When the client leaves, all of them are cancelled."""
        stream = Stream()
        wants_status = dict(context.invocation_metadata()).get(WANTS_STATUS) == "true"
        reading = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (item := await stream.responses.get()) is not None:
                request, result = item
                if isinstance(result, Failure):
                    if wants_status:
                        await context.abort(STATUS[result.reason], result.message)
                    response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
                    await context.write(
                        pb.ModelStreamInferResponse(error_message=result.message, infer_response=response)
                    )
                else:
                    tensors, is_last = result
                    response = write_response(request, tensors, is_last=is_last)
                    await context.write(pb.ModelStreamInferResponse(infer_response=response))
        finally:
            stream.is_cancelled = True
            reading.cancel()

    async def _read(self, requests: Any, stream: "Stream") -> None:
        """Give the requests of a stream to their models."""
        try:
            async for request in requests:
                stream.num_open += 1
                model = self._models.get(request.model_name)
                sender = Sender(request, stream)
                if model is None or request.model_version not in ("", VERSION):
                    known = ", ".join(self._models)
                    sender.fail(INVALID, f"model_name: must be version {VERSION} of one of {known}")
                else:
                    model.take(request, sender)
        finally:
            stream.end_one()

    async def _model(self, request: Any, context: Any) -> Model:
        model = self._models.get(request.name)
        if model is None or request.version not in ("", VERSION):
            known = ", ".join(self._models)
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"name: must be version {VERSION} of one of {known}"
            )
        assert model is not None
        return model


@dataclass(frozen=True)
class Failure:
    """Ends a request. reason: one of those that the metrics count"""

    reason: str
    message: str


class Stream:
    """What has to be sent to the client of a stream; None when nothing more will come.

    num_open: requests that have not ended, and one more while the client may send others
    """

    def __init__(self) -> None:
        self.responses: asyncio.Queue[tuple[Any, tuple[Tensors, bool] | Failure] | None] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.num_open = 1
        self.is_cancelled = False

    def put(self, request: Any, result: tuple[Tensors, bool] | Failure) -> None:
        self.responses.put_nowait((request, result))
        if isinstance(result, Failure) or result[1]:
            self.end_one()

    def end_one(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self.responses.put_nowait(None)


class Sender:
    """A ``ResponseSender`` of one request of a stream."""

    def __init__(self, request: Any, stream: Stream):
        self._request, self._stream = request, stream
        self.arrived = time.monotonic()

    def send(self, tensors: Tensors, *, is_last: bool) -> None:
        self._stream.loop.call_soon_threadsafe(self._stream.put, self._request, (tensors, is_last))

    def fail(self, reason: str, message: str) -> None:
        self._stream.loop.call_soon_threadsafe(self._stream.put, self._request, Failure(reason, message))

    def is_cancelled(self) -> bool:
        return self._stream.is_cancelled


def _described(info: TensorInfo) -> Any:
    """A tensor as Triton describes it, with the batch axis."""
    return pb.ModelMetadataResponse.TensorMetadata(
        name=info.name, datatype=info.datatype, shape=[-1, info.size]
    )
