"""More clients of a real tritonserver than it has slots: some leave, some find the queue full."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from tritonclient import grpc
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from benchmarks.load.clients import LONG, served_together
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import (
    GENERATE_STREAM,
    MAX_NUM_SEQS,
    MAX_QUEUE_SIZE,
    PATIENCE,
    Server,
    expected_text,
)
from triton_repo.triton.grpc_client import request_inputs, stream, stream_async
from triton_repo.triton.tensors import MODEL, TEXT


def leave_grpc(server: Server, options: dict[str, Any]) -> None:
    with grpc.InferenceServerClient(server.url) as client:
        responses = stream(client, options)
        next(responses)
        responses.close()  # type: ignore[attr-defined]


def leave_http(server: Server, options: dict[str, Any]) -> None:
    url = f"http://localhost:{server.http_port}/v2/{GENERATE_STREAM}"
    with urllib.request.urlopen(url, json.dumps(options).encode(), timeout=PATIENCE) as answer:
        answer.readline()


def test_a_client_that_leaves_frees_its_slot(server: Server) -> None:
    """Over gRPC and over HTTP, more clients leave than there are slots. No slot is lost, and their texts are
    not decoded to the end.
    """
    before, length = server.counter("ctc_tokens"), LONG["max_tokens"]
    # With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
    options = {**LONG, "text_input": "How many?", "temperature": 9.0}
    count = 2 * MAX_NUM_SEQS
    for _ in range(count):
        leave_grpc(server, options)
    for _ in range(count):
        leave_http(server, options)
    assert asyncio.run(served_together(server.url, MAX_NUM_SEQS))
    assert server.counter("ctc_tokens") - before - MAX_NUM_SEQS * length < count * length


def test_requests_beyond_the_queue_are_refused_at_once(server: Server, decoder: SpeculativeDecoder) -> None:
    """While long requests hold every slot, exactly the queue's requests wait, and others are refused."""
    num_refused = 8
    refusal = f"queue: it is full with {MAX_QUEUE_SIZE} requests"

    async def ask() -> str:
        options = {"text_input": "x", "max_tokens": 24, "stream": True}
        texts = [response["text_output"][0] async for response in stream_async(server.url, options)]
        return b"".join(texts).decode()

    async def status_of_one_more() -> Any:
        async def request() -> AsyncIterator[dict[str, Any]]:
            inputs = request_inputs(TEXT, {"text_input": "x", "max_tokens": 1})
            yield {"model_name": MODEL, "inputs": inputs}

        async with aio.InferenceServerClient(server.url) as client:
            try:
                async for _ in client.stream_infer(request(), headers={"triton_grpc_error": "true"}):
                    pass
            except AioRpcError as error:
                return error.code()

    async def texts_of_the_queue() -> list[str]:
        # With a high temperature, every token is drawn from the whole vocabulary, so decoding is slow.
        holders = [stream_async(server.url, {**LONG, "temperature": 9.0}) for _ in range(MAX_NUM_SEQS)]
        for holder in holders:
            await anext(holder)
        completed = asyncio.as_completed([ask() for _ in range(MAX_QUEUE_SIZE + num_refused)])
        for _ in range(num_refused):
            with pytest.raises(InferenceServerException, match=refusal):
                await next(completed)
        assert await status_of_one_more() == StatusCode.UNAVAILABLE
        for holder in holders:
            await holder.aclose()
        return [await text for text in completed]

    texts = asyncio.run(texts_of_the_queue())
    assert texts == [expected_text(decoder, "x", count=24)] * MAX_QUEUE_SIZE
