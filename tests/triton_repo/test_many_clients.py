"""More clients of a real tritonserver than it has slots: some leave, some find the queue full."""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

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
    count, length = 60, 120
    expected = expected_text(decoder, "x", count=length)
    # Texts and errors, in the order in which the requests end.
    ended: list[str] = []

    async def ask() -> None:
        options = {"text_input": "x", "max_tokens": length, "stream": True}
        try:
            texts = [response["text_output"][0] async for response in stream_async(server.url, options)]
            ended.append(b"".join(texts).decode())
        except InferenceServerException as error:
            ended.append(str(error))

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

    async def ask_all_at_once() -> None:
        tasks = [asyncio.create_task(ask()) for _ in range(count)]
        # The first request to end is a refused one. The queue then stays full until all requests have
        # arrived and a running one has ended.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert await status_of_one_more() == StatusCode.UNAVAILABLE
        await asyncio.gather(*tasks)

    asyncio.run(ask_all_at_once())
    refusal = f"queue: it is full with {MAX_QUEUE_SIZE} requests"
    served = [place for place, text in enumerate(ended) if text == expected]
    refused = [place for place, text in enumerate(ended) if refusal in text]
    assert len(served) + len(refused) == count
    assert len(served) >= MAX_QUEUE_SIZE
    # Refused requests did not wait for others: the last refusal comes before half of the texts.
    assert refused[-1] < served[len(served) // 2]
