"""Streams of responses from a running server over gRPC, for threads and for asyncio."""

import asyncio
import ipaddress
import json
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from grpc.aio import AioRpcError
from numpy.typing import NDArray
from tritonclient import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import Prompt, encode_utf8
from triton_repo.triton.tensors import MODEL, MODELS, NUMPY_TYPES, TEXT, TOKENS, inputs_of

# A stream without a response for this many seconds is given up.
TIMEOUT = 120.0
# Seconds until a server that does not answer counts as absent.
CONNECT_TIMEOUT = 10.0
# Messages may have any size. Attempts to reach a Triton server that was stopped are at most a second apart;
# without the option it would be two minutes.
CHANNEL = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# The status of a model that a server does not have.
NOT_FOUND = "StatusCode.NOT_FOUND"
CONNECTION_ENDED = "the connection to the server has ended"
# The inputs that errors of a Triton model name.
INPUTS = {info.name for interface in (TEXT, TOKENS) for info in inputs_of(interface)}


def channel_args(url: str, *, is_own: bool = False) -> list[tuple[str, int]]:
    """The options of a connection. No proxy of the environment stands between servers of this machine.

    url: the server's gRPC address
    is_own: whether the server is known to run on this machine, whatever its address
    """
    return [*CHANNEL, ("grpc.enable_http_proxy", 0)] if is_own or _is_loopback(url) else CHANNEL


def _is_loopback(url: str) -> bool:
    with suppress(ValueError):
        host = urlsplit(f"//{url}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def connect(url: str, *, is_own: bool = False) -> aio.InferenceServerClient:
    """A connection for many requests: a new one would delay every first token by milliseconds.

    url, is_own: as of ``channel_args``
    """
    return aio.InferenceServerClient(url, channel_args=channel_args(url, is_own=is_own))


def read_failure(error: InferenceServerException) -> tuple[int, UserError]:
    """The HTTP status and the message of an error of Triton or of one of its models.

    A stream's errors have no status of Triton's: 2.51 may crash if it is asked for one (docs/serving.md). An
    error that names an input is the client's. Of the others most are a full queue, a server that stops or
    one that cannot be reached, so that another attempt may succeed.
    """
    found = UserError.of_text(error.message(), INPUTS)
    if found.field is not None:
        return 400, found
    if error.status() == NOT_FOUND:
        return 404, found
    return 500 if found.problem.startswith("internal error") else 503, found


def model_config(url: str, model: str) -> Any:
    """A served model's configuration, the ``ModelConfig`` of Triton's protocol.

    url: the server's gRPC address
    Raises UserError if no server with this model can be reached there.
    """
    try:
        with grpc.InferenceServerClient(url, channel_args=channel_args(url)) as client:
            return client.get_model_config(model, client_timeout=CONNECT_TIMEOUT).config
    except InferenceServerException as error:
        raise UserError(f"--url: no server at {url} serves {model}: {error.message()}") from error


def prompt_options(prompt: Prompt) -> dict[str, Any]:
    """The options of a request that say its prompt."""
    if prompt.before:
        return {"messages": json.dumps(prompt.messages, ensure_ascii=False)}
    return {"text_input": prompt.text, "raw": prompt.raw}


def request_inputs(interface: str, options: Mapping[str, Any]) -> list[grpc.InferInput]:
    """tritonclient's tensors for a request's options, such as ``text_input="..."`` and ``max_tokens=32``.

    Raises UserError for an option the model does not have, RequestError for text that has no UTF-8 form and
    for a number outside its type.
    """
    infos = {info.name: info for info in inputs_of(interface)}
    inputs = []
    for name, value in options.items():
        if name not in infos:
            raise UserError(f"is no input of this model; it has {', '.join(infos)}", field=name)
        info = infos[name]
        values = value if isinstance(value, (list, tuple)) else [value]
        if info.triton_type == "TYPE_STRING":
            values = [encode_utf8(name, text) if isinstance(text, str) else text for text in values]
        array = _in_range(name, values, NUMPY_TYPES[info.triton_type])[None]
        tensor = grpc.InferInput(name, array.shape, info.datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _in_range(name: str, values: Sequence[Any], dtype: Any) -> NDArray[Any]:
    """An array of the values. Raises RequestError where a whole number has no place in the type."""
    if np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        wrong = next((value for value in values if not limits.min <= value <= limits.max), None)
        if wrong is not None:
            problem = f"must be between {limits.min} and {limits.max}, got {wrong}"
            raise RequestError(problem, field=name)
    return np.array(values, dtype)


def stream(
    client: grpc.InferenceServerClient, options: Mapping[str, Any], *, model: str = MODEL
) -> Iterator[dict[str, Any]]:
    """Yield every response as it comes: its output tensors by name, without the batch axis.

    The client must have no other stream open. Closing the iterator cancels the request.
    Raises InferenceServerException if the server refuses the request or cannot be reached.
    """
    events: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: events.put((result, error)))
    ended = False
    try:
        client.async_stream_infer(
            model, request_inputs(MODELS[model], options), enable_empty_final_response=True
        )
        while True:
            result, error = events.get(timeout=TIMEOUT)
            if error is not None:
                # A stream that is cancelled just as it ends may stay in the server (docs/serving.md), so
                # this one is not cancelled.
                ended = True
                raise error
            outputs = _outputs(result)
            final = result.get_response().parameters["triton_final_response"].bool_param
            ended = final or _is_last(outputs)
            if outputs:
                yield outputs
            if final:
                return
    except queue.Empty:
        raise InferenceServerException(f"no response within {TIMEOUT:g} s") from None
    finally:
        client.stop_stream(cancel_requests=not ended)


async def stream_async(
    url: str, options: Mapping[str, Any], *, model: str = MODEL
) -> AsyncGenerator[dict[str, Any], None]:
    """Do the same as ``stream`` for asyncio, over a new connection."""
    async with (
        connect(url) as client,
        aclosing(stream_over(client, options, model=model)) as responses,
    ):
        async for outputs in responses:
            yield outputs


async def stream_over(
    client: aio.InferenceServerClient, options: Mapping[str, Any], *, model: str = MODEL
) -> AsyncGenerator[dict[str, Any], None]:
    """Do the same over a connection that may have other streams open."""

    inputs = request_inputs(MODELS[model], options)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": model, "inputs": inputs}

    failure, ended = None, False
    responses = client.stream_infer(requests())
    try:
        async for result, error in responses:
            if error is None:
                outputs = _outputs(result)
                ended = _is_last(outputs)
                yield outputs
            else:
                # The stream is read to its end instead of cancelled, for the reason given in ``stream``.
                failure = error
    except GeneratorExit:
        if ended:
            async for _ in responses:
                pass
        else:
            responses.cancel()
        raise
    except asyncio.CancelledError:
        responses.cancel()
        raise
    except AioRpcError as error:
        # tritonclient's other clients raise this for the same failure.
        message = f"{CONNECTION_ENDED}: {error.details() or error}"
        raise InferenceServerException(message, str(error.code())) from error
    if failure is not None:
        raise failure


def _outputs(result: Any) -> dict[str, Any]:
    """A response's tensors by name, without the batch axis."""
    return {output.name: result.as_numpy(output.name).reshape(-1) for output in result.get_response().outputs}


def _is_last(outputs: Mapping[str, Any]) -> bool:
    return bool(outputs) and bool(outputs["finish_reason"][0])
