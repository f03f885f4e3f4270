"""JSON of ``generate`` to inputs of a Triton model, and its outputs to JSON, as Triton's own HTTP does it."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from runtime.core.errors import RequestError
from triton_repo.triton.tensors import LEAST_LOG_PROB, TensorInfo, inputs_of
from triton_repo.web.json_body import shown


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


# What a value of each type may be, in words and as a check.
KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "TYPE_STRING": ("a string", lambda value: isinstance(value, str)),
    "TYPE_BOOL": ("true or false", lambda value: isinstance(value, bool)),
    "TYPE_FP32": ("a number", lambda value: type(value) in (int, float) and abs(value) < 3.4e38),
    "TYPE_INT32": ("a whole number of 32 bits", _whole(-(2**31), 2**31 - 1)),
    "TYPE_UINT64": ("a whole number between 0 and 2^64 - 1", _whole(0, 2**64 - 1)),
}


def read_inputs(interface: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name. Fields that no input has are ignored, and so are those that are null.

    Raises RequestError for a value that is not of its input's type.
    """
    infos = {info.name: info for info in inputs_of(interface)}
    return {
        name: _value(infos[name], value)
        for name, value in body.items()
        if name in infos and value is not None
    }


def _value(info: TensorInfo, value: Any) -> Any:
    expected, is_one = KINDS[info.triton_type]
    values = value if isinstance(value, list) else [value]
    if all(map(is_one, values)) and (info.size == -1 or len(values) == 1):
        return values
    expected = expected if info.size == 1 else f"{expected}, or a list of them"
    raise RequestError(f"must be {expected}, got {shown(value)}", field=info.name)


def write_outputs(model: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A response's tensors as Triton writes them: one element as it is, several as a list."""
    lists = {name: [_written(value) for value in array] for name, array in outputs.items()}
    values = {name: each[0] if len(each) == 1 else each for name, each in lists.items()}
    return {"model_name": model, "model_version": "1", **values}


def _written(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    plain = value.item() if isinstance(value, np.generic) else value
    return plain if not isinstance(plain, float) or math.isfinite(plain) else LEAST_LOG_PROB
