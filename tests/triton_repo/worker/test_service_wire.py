"""Tensors of the gRPC protocol in both of its forms, and wrong ones."""

from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferResult, service_pb2

from runtime.core.errors import RequestError
from triton_repo.triton.grpc_client import request_inputs
from triton_repo.triton.tensors import TEXT
from triton_repo.worker.service import read_tensors, write_response

OPTIONS: dict[str, Any] = {
    "text_input": "Ünï ✓",
    "stop_words": ["a", "", "ünï"],
    "max_tokens": 7,
    "temperature": 0.5,
    "seed": 2**64 - 1,
    "stream": True,
}


def request(**options: Any) -> Any:
    """As tritonclient sends it."""
    message = service_pb2.ModelInferRequest(model_name="m", id="1")
    for tensor in request_inputs(TEXT, options):
        message.inputs.append(tensor._get_tensor())
        message.raw_input_contents.append(tensor._get_content())
    return message


def test_what_tritonclient_sends() -> None:
    found = {name: array.tolist() for name, array in read_tensors(request(**OPTIONS)).items()}
    texts = {"text_input": [["Ünï ✓".encode()]], "stop_words": [[b"a", b"", "ünï".encode()]]}
    numbers = {name: [[OPTIONS[name]]] for name in ("max_tokens", "temperature", "seed", "stream")}
    assert found == {**texts, **numbers}


def test_what_clients_without_bytes_send() -> None:
    message = service_pb2.ModelInferRequest()
    message.inputs.add(name="a", datatype="BYTES", shape=[1, 2]).contents.bytes_contents.extend([b"x", b""])
    message.inputs.add(name="b", datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(True)
    message.inputs.add(name="c", datatype="INT32", shape=[1, 1]).contents.int_contents.append(-3)
    found = read_tensors(message)
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [[b"x", b""]],
        "b": [[True]],
        "c": [[-3]],
    }
    assert [array.dtype for array in found.values()] == [np.object_, np.bool_, np.int32]


def wrong_requests() -> list[tuple[Any, str]]:
    shape, twice, cut, few, memory = (request(max_tokens=7) for _ in range(5))
    shape.inputs[0].shape[:] = [1, 2]
    twice.MergeFrom(request(max_tokens=8))
    cut.raw_input_contents[0] = b"123"
    few.inputs.append(few.inputs[0])
    memory.inputs[0].parameters["shared_memory_region"].string_param = "x"
    flat, text = request(max_tokens=7), request(text_input="xy")
    flat.inputs[0].shape[:] = [1]
    text.raw_input_contents[0] = text.raw_input_contents[0][:-1]
    kind = request(max_tokens=7)
    kind.inputs[0].datatype = "FP64"
    return [
        (shape, "max_tokens: must have the shape"),
        (flat, "max_tokens: must have the shape"),
        (twice, "max_tokens: must be given once"),
        (cut, "max_tokens: cannot be read"),
        (text, "text_input: cannot be read"),
        (few, "raw_input_contents: must be as many as the 2 inputs, got 1"),
        (memory, "max_tokens: must be in the request"),
        (kind, "max_tokens: must be one of BYTES"),
    ]


@pytest.mark.parametrize(("message", "problem"), wrong_requests())
def test_wrong_tensors(message: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=f"^{problem}"):
        read_tensors(message)


def test_responses() -> None:
    """They are what tritonclient reads, and have the outputs that the request asks for."""
    tensors: dict[str, Any] = {
        "text_output": np.array(["Ünï".encode()], np.object_),
        "num_steps": np.array([[3]], np.int32),
    }
    message = request(max_tokens=1)
    whole = write_response(message, tensors, is_last=True)
    assert whole.parameters["triton_final_response"].bool_param
    result = InferResult(whole)
    for name, array in tensors.items():
        assert result.as_numpy(name).tolist() == array.tolist()
    message.outputs.add(name="num_steps")
    (output,) = write_response(message, tensors, is_last=False).outputs
    assert output.name == "num_steps"
