"""Tensors of Triton's gRPC protocol: requests to numpy, and responses from it.

The protocol is the open inference protocol (https://kserve.github.io/website/latest/modelserving/data_plane):
the bytes of all inputs stand in ``raw_input_contents``, or each input's values in its own ``contents``.
"""

import struct
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, triton_to_np_dtype

from runtime.core.errors import RequestError
from triton_repo.triton.model import Tensors

# The field of ``contents`` that holds the values of each type of our inputs.
CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "FP32": "fp32_contents",
    "UINT64": "uint64_contents",
    "BOOL": "bool_contents",
}
LENGTH = struct.Struct("<I")


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
            response.raw_output_contents.append(_bytes(array))
    return response


def _bytes(array: NDArray[Any]) -> bytes:
    if array.dtype == np.object_:
        return b"".join(LENGTH.pack(len(text)) + text for text in array.reshape(-1))
    return array.tobytes()
