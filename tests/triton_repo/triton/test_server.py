"""Requests to a real tritonserver and to our own server: the runtime's text, and clear errors."""

import json
import queue
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import GENERATE, GENERATE_STREAM, PATIENCE, PROMPTS, Server, expected_text
from triton_repo.triton.grpc_client import stream
from triton_repo.triton.tensors import MODEL


def sampling_of(index: int) -> dict[str, Any]:
    """Sampling options for every other request."""
    return {"temperature": 0.75, "top_k": 40, "seed": index} if index % 2 else {}


def test_the_runtime_s_text_one_by_one_and_together(each_server: Server, decoder: SpeculativeDecoder) -> None:
    requests = [(PROMPTS[index % len(PROMPTS)], sampling_of(index)) for index in range(64)]
    expected = [expected_text(decoder, text, **sampling) for text, sampling in requests]

    def over_grpc(request: tuple[str, dict[str, Any]]) -> str:
        return each_server.text(text_input=request[0], **request[1])

    def over_http(request: tuple[str, dict[str, Any]]) -> str:
        body = {"text_input": request[0], "max_tokens": 24, "stream": True, **request[1]}
        lines = each_server.fetch(GENERATE_STREAM, json.dumps(body).encode()).decode().splitlines()
        return "".join(json.loads(line[6:])["text_output"] for line in lines if line.startswith("data: "))

    for index, request in enumerate(requests):
        if request not in requests[:index]:
            assert over_grpc(request) == expected[index]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(over_grpc, requests)) == expected
        assert list(pool.map(over_http, requests)) == expected


def test_a_reused_prefix(each_server: Server, decoder: SpeculativeDecoder) -> None:
    text = "How many days are there in the four weeks of a month without a holiday?" * 2
    before, cached = each_server.counter("ctc_prefix_hit_tokens"), []
    for end in ("", " Say why."):
        responses = each_server.ask(text_input=text + end)
        found = b"".join(response["text_output"][0] for response in responses).decode()
        assert found == expected_text(decoder, text + end)
        cached.append({int(response["num_cached_tokens"]) for response in responses})
    counts = [count for (count,) in cached]  # every response of a request says the same
    assert counts[1] >= 31
    assert each_server.counter("ctc_prefix_hit_tokens") == before + sum(counts)


def test_one_response_without_streaming(each_server: Server, decoder: SpeculativeDecoder) -> None:
    (response,) = each_server.ask(text_input="How many?", stream=False, return_log_probs=True)
    assert response["text_output"][0].decode() == expected_text(decoder, "How many?")
    assert response["num_output_tokens"] == 24
    assert response["num_input_tokens"] == len(decoder.prompt_tokenizer.encode("How many?"))
    assert response["finish_reason"][0] == b"length"
    assert response["acceptance_length"] == pytest.approx(23 / response["num_steps"])
    assert response["output_log_probs"].shape == (24,)
    assert b"".join(response["output_tokens"]) == response["text_output"][0]
    assert response["cum_log_probs"] == pytest.approx(response["output_log_probs"].sum(), rel=1e-5)
    generated = json.loads(each_server.fetch(GENERATE, b'{"text_input": "How many?", "max_tokens": 24}'))
    assert generated["text_output"] == expected_text(decoder, "How many?")


def test_options_over_the_wire(each_server: Server, decoder: SpeculativeDecoder) -> None:
    whole = each_server.text(text_input="How many?", max_tokens=40)
    stop_word = whole[5:8]
    stopped = each_server.text(text_input="How many?", max_tokens=40, stop_words=[stop_word])
    assert stopped == whole[: whole.find(stop_word)]
    absent = ["", "\ue000", "ก" * 50]
    assert each_server.text(text_input="How many?", max_tokens=40, stop_words=absent) == whole
    for streamed in (False, True):
        echoing = each_server.text(text_input="How many?", exclude_input_in_output=False, stream=streamed)
        assert echoing.startswith("How many?") is not streamed
    raw = decoder.stream(decoder.prompt_tokenizer.encode("How many?", raw=True), max_new_tokens=24)
    assert each_server.text(text_input="How many?", raw=True) == "".join(chunk.text for chunk in raw)
    (first,) = each_server.ask(text_input="x", max_tokens=1, logit_bias='{"77": 1000}', return_log_probs=True)
    assert first["text_output"][0].decode() == decoder.prompt_tokenizer.tokenizer.decode([77])


def test_without_max_tokens_the_context_is_filled(each_server: Server, decoder: SpeculativeDecoder) -> None:
    with grpc.InferenceServerClient(each_server.url) as client:
        (response,) = stream(client, {"text_input": "How many?", "end_id": -1})
    assert response["num_input_tokens"] + response["num_output_tokens"] == decoder.max_length
    assert response["finish_reason"][0] == b"length"


def test_a_client_of_tensorrt_llm(each_server: Server, decoder: SpeculativeDecoder) -> None:
    """What the TensorRT-LLM backend's own gRPC client sends, and how it reads the answer."""
    arrays: dict[str, Any] = {
        "text_input": np.array([["How many?"]]).astype(object),
        "max_tokens": np.array([[24]], np.int32),
        "stream": np.array([[True]]),
        "beam_width": np.array([[1]], np.int32),
        "temperature": np.array([[0.0]], np.float32),
        "num_return_sequences": np.array([[1]], np.int32),
        "repetition_penalty": np.array([[1.0]], np.float32),
        "pad_id": np.array([[3]], np.int32),
        "return_log_probs": np.array([[True]]),
        "return_context_logits": np.array([[False]]),
        "exclude_input_in_output": np.array([[False]]),
    }
    inputs = []
    for name, array in arrays.items():
        tensor = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    outputs = [grpc.InferRequestedOutput(name) for name in ("text_output", "output_log_probs")]
    events: list[tuple[Any, Any]] = []
    with grpc.InferenceServerClient(each_server.url) as client:
        client.start_stream(callback=lambda result, error: events.append((result, error)))
        client.async_stream_infer(MODEL, inputs, outputs=outputs, request_id="1")
        client.stop_stream()
    assert [error for _, error in events if error is not None] == []
    texts = [result.as_numpy("text_output")[0].decode("utf-8") for result, _ in events]
    assert "".join(texts) == expected_text(decoder, "How many?")


def test_tokens_in_tokens_out(each_server: Server, decoder: SpeculativeDecoder) -> None:
    prompt = decoder.prompt_tokenizer.encode("How many?")
    responses = each_server.ask(input_ids=prompt)
    expected = [t for c in decoder.stream(prompt, max_new_tokens=24) for t in c.token_ids]
    assert np.concatenate([response["output_ids"] for response in responses]).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_input": ""}, "text_input: must not be empty"),
        ({"text_input": b"\xff\xfe"}, "text_input: must be UTF-8 text"),
        ({"text_input": "a" * 600}, "text_input: must be shorter than the context of 512 tokens"),
        ({"text_input": "a" * 1_000_000}, "of 512 tokens, got 1000000 characters"),
        ({"stop_words": ["a"] * 33}, "stop_words: must be at most 32, got 33"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": -5}, "max_tokens: must be at least 1"),
        ({"max_tokens": 4096}, "max_tokens: must be at most"),
        ({"temperature": -0.5}, "temperature: must be a number from 0 on, got -0.5"),
        ({"temperature": float("nan")}, "temperature: must be a number from 0 on, got nan"),
        ({"top_p": 0.0}, "top_p: must be above 0"),
        ({"beam_width": 4}, "beam_width: must be 1, got 4"),
        ({"logit_bias": '{"9999": 1}'}, "logit_bias: must be token ids below 258, got 9999"),
    ],
)
def test_bad_requests_name_the_tensor(each_server: Server, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        each_server.ask(**{"text_input": "x", **options})
    assert message in str(caught.value)


LONG = {"role": "user", "content": "a" * 600}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [9999]}, "input_ids: token ids must be below 258, got 9999 at index 0"),
        ({"input_ids": [5] * 600}, "input_ids: must be shorter than"),
        (
            {"messages": json.dumps([LONG])},
            "messages: must be shorter than",
        ),
    ],
)
def test_errors_name_the_prompt_that_was_given(
    each_server: Server, body: dict[str, Any], message: str
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        each_server.fetch(GENERATE, json.dumps(body).encode())
    assert json.loads(caught.value.read())["error"].startswith(message)


def test_wrong_tensors_are_refused(each_server: Server) -> None:
    """The server itself checks names, types and shapes."""

    def tensor(name: str, kind: str, array: Any) -> grpc.InferInput:
        return grpc.InferInput(name, array.shape, kind).set_data_from_numpy(array)

    text = tensor("text_input", "BYTES", np.array([[b"x"]], np.object_))
    count = tensor("max_tokens", "INT32", np.array([[4]], np.int32))
    for inputs in (
        [count],
        [text, count, tensor("nonsense", "INT32", np.array([[4]], np.int32))],
        [text, tensor("max_tokens", "FP32", np.array([[4]], np.float32))],
        [text, tensor("max_tokens", "INT32", np.array([[4, 5]], np.int32))],
        [text, tensor("max_tokens", "INT32", np.array([4], np.int32))],
    ):
        errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with grpc.InferenceServerClient(each_server.url) as client:
            client.start_stream(callback=lambda result, error, errors=errors: errors.put(error))
            client.async_stream_infer(MODEL, inputs)
            assert isinstance(errors.get(timeout=PATIENCE), InferenceServerException)
    assert each_server.text(text_input="x")


def test_no_request_reaches_a_file(each_server: Server) -> None:
    """Of Triton's APIs that open or write files, or change what is served, none answers."""
    with grpc.InferenceServerClient(each_server.url) as client:
        for ask in (
            lambda: client.register_system_shared_memory("x", "/x", 8),
            lambda: client.update_trace_settings(settings={"trace_file": "x"}),
            lambda: client.update_log_settings({"log_file": "x"}),
        ):
            with pytest.raises(InferenceServerException, match="restricted"):
                ask()
        with pytest.raises(InferenceServerException, match=r"not allowed|restricted"):
            client.unload_model(MODEL)
    for path in ("systemsharedmemory/region/x/register", "trace/setting", "logging", "repository/index"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            each_server.fetch(path, b"{}")
    for path, body in (
        ("models/absent", None),
        ("models/absent/ready", None),
        ("models/absent/generate", b"{}"),
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            each_server.fetch(path, body)


def test_metrics(each_server: Server) -> None:
    names = ("requests", "tokens", "steps", "nodes", "accepted")
    before = {name: each_server.counter(f"ctc_{name}") for name in names}
    (*_, last) = each_server.ask(text_input="How many?")
    after = {name: each_server.counter(f"ctc_{name}") for name in before}
    steps = int(last["num_steps"][0])
    assert after["requests"] - before["requests"] == 1
    assert after["tokens"] - before["tokens"] == last["num_output_tokens"][0]
    assert after["steps"] - before["steps"] == steps
    assert steps <= after["nodes"] - before["nodes"] <= 7 * steps
    assert after["accepted"] - before["accepted"] <= 23
