"""The server's side of a request: input tensors to the runtime's options, chunks to output tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import RequestError, UserError
from runtime.core.messages import MessageError, read_conversation
from runtime.decode.sampling_params import SamplingParams
from triton_repo.triton.tensors import (
    COMPLETIONS,
    NUMPY_TYPES,
    ONLY,
    OPTIONS,
    PROMPTS,
    TEXT,
    TensorInfo,
    inputs_of,
    outputs_of,
)

# Tensors that are fields of ``SamplingParams`` as they are.
SAMPLING = {info.name for info in OPTIONS} & {field.name for field in fields(SamplingParams)} - {"logit_bias"}
# Characters of JSON: enough for a bias on every token of a large vocabulary.
MAX_LOGIT_BIAS = 1 << 22


@dataclass(frozen=True)
class GenerateRequest:
    """A request's options, read from its tensors.

    prompt: text, or token ids; empty with a conversation
    messages: a conversation, or None
    template_options: further variables of the chat template, for a conversation
    max_new_tokens: None for as many as the context has room for
    end_id: ends the text in place of the model's own end-of-text tokens
    raw: continue the prompt as it is, without the chat template
    add_special_tokens: of a raw prompt, as for ``PromptTokenizer.encode``
    echo: put the prompt before the output; never in a stream
    """

    prompt: str | list[int]
    messages: list[dict[str, str]] | None
    template_options: dict[str, Any]
    max_new_tokens: int | None
    stop_strings: tuple[str, ...]
    end_id: int | None
    sampling: SamplingParams
    stream: bool
    raw: bool
    add_special_tokens: bool
    echo: bool


def read_request(interface: str, tensors: Mapping[str, NDArray[Any]]) -> GenerateRequest:
    """Check a request's tensors and read them.

    tensors: the inputs by name as Triton passes them, with a batch axis of size 1
    Raises RequestError that names the tensor, what was expected and what came.
    """
    infos = {info.name: info for info in inputs_of(interface)}
    for name in tensors:
        if name not in infos:
            raise RequestError(f"is no input of this model; it has {', '.join(infos)}", field=name)
    values = {name: _values(infos[name], array) for name, array in tensors.items()}
    for info in infos.values():
        if not info.optional and info.name not in values:
            raise RequestError("is missing", field=info.name)
    scalars: dict[str, Any] = {name: value[0] for name, value in values.items() if infos[name].size == 1}
    for name, only in ONLY.items():
        if scalars.get(name, only) != only:
            raise RequestError(f"must be {only}, got {scalars[name]}", field=name)
    if any(values.get("bad_words", [])):
        raise RequestError("must be empty; logit_bias can keep a token out", field="bad_words")
    sampling: dict[str, Any] = {name: scalars[name] for name in SAMPLING if name in scalars}
    if "logit_bias" in scalars:
        sampling["logit_bias"] = _logit_bias(scalars["logit_bias"])
    stream = scalars.get("stream", False)
    return GenerateRequest(
        prompt=scalars.get("text_input", "") if interface == TEXT else values[PROMPTS[interface].name],
        messages=_messages(scalars) if interface == TEXT else None,
        template_options=_json_object("template_options", scalars.get("template_options", "{}")),
        max_new_tokens=scalars.get("max_tokens"),
        stop_strings=tuple(word for word in values.get("stop_words", []) if word),
        end_id=scalars.get("end_id"),
        sampling=SamplingParams(**sampling, log_probs=scalars.get("return_log_probs", False)),
        stream=stream,
        raw=scalars.get("raw", False),
        add_special_tokens=scalars.get("add_special_tokens", True),
        echo=not (stream or scalars.get("exclude_input_in_output", True)),
    )


def _messages(scalars: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The conversation; None for a request with ``text_input`` in its place."""
    given = [name for name in ("text_input", "messages") if name in scalars]
    if not given:
        raise RequestError("is missing, and messages too; one of them is needed", field="text_input")
    if len(given) == 2:
        raise RequestError("must not be given together with text_input", field="messages")
    if given == ["text_input"]:
        if "template_options" in scalars:
            raise RequestError("is for messages, got text_input", field="template_options")
        return None
    for name in ("raw", "add_special_tokens"):
        if name in scalars:
            raise RequestError("is for text_input, got messages", field=name)
    text = scalars["messages"]
    try:
        return read_conversation(json.loads(text))
    except MessageError as error:
        raise RequestError(str(error), field="messages") from error
    except (ValueError, RecursionError) as error:
        expected = 'a JSON list of messages such as {"role": "user", "content": "Hi"}'
        raise RequestError(f"must be {expected}, got {text[:80]!r}", field="messages") from error


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, got {text[:80]!r}", field=name)
    return value


def error_message(interface: str, error: UserError) -> str:
    """A runtime error's message, with the tensor's name in place of the runtime option's."""
    tensors = {
        "prompt": PROMPTS[interface].name,
        "max_new_tokens": "max_tokens",
        "stop_strings": "stop_words",
    }
    name = tensors.get(error.field or "")
    return str(UserError(error.problem, field=name)) if name else str(error)


def _values(info: TensorInfo, array: NDArray[Any]) -> list[Any]:
    """A tensor's elements as Python values."""
    expected = NUMPY_TYPES[info.triton_type]
    if array.dtype != expected:
        raise RequestError(f"must be {info.triton_type}, got {array.dtype}", field=info.name)
    if info.size == 1 and array.size != 1:
        raise RequestError(f"must have one element, got shape {list(array.shape)}", field=info.name)
    values = array.reshape(-1).tolist()
    return [_text(info.name, value) for value in values] if expected is np.object_ else values


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = value[error.start]
        raise RequestError(f"must be UTF-8 text, got byte {byte:#04x} at {error.start}", field=name) from None


def _logit_bias(text: str) -> dict[int, float]:
    """Read JSON such as ``{"17": -2.5}``."""
    expected = 'a JSON object of token ids and numbers, such as {"17": -2.5}'
    if len(text) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"must be at most {MAX_LOGIT_BIAS} characters long, got {len(text)}", field="logit_bias"
        )
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RequestError(f"must be {expected}, got {text[:80]!r}", field="logit_bias") from error


def response_tensors(
    interface: str,
    completion: str | list[int],
    *,
    log_probs: list[float] | None,
    tokens: list[str],
    cum_log_prob: float,
    num_input_tokens: int,
    num_output_tokens: int,
    num_steps: int,
    finish_reason: str | None,
    make: Callable[[str, NDArray[Any]], Any],
) -> list[Any]:
    """A response's tensors, each built by ``make(name, array)``.

    Every array has a batch axis of size 1. ``text_output`` has no other axis, because clients of the
    TensorRT-LLM backend read ``as_numpy("text_output")[0].decode()``.

    completion, log_probs, tokens: the part since the last response; the other values are of the whole output
        so far. The tokens' texts are returned with the log-probabilities.
    """
    values: dict[str, Any] = {
        COMPLETIONS[interface].name: completion.encode() if isinstance(completion, str) else completion,
        "sequence_index": [0],
        "num_input_tokens": [num_input_tokens],
        "num_output_tokens": [num_output_tokens],
        "num_steps": [num_steps],
        "acceptance_length": [(num_output_tokens - 1) / num_steps if num_steps else 1.0],
        "finish_reason": [(finish_reason or "").encode()],
    }
    if log_probs is not None:
        values |= {"cum_log_probs": [cum_log_prob], "output_log_probs": log_probs}
        values["output_tokens"] = [token.encode() for token in tokens]
    infos = {info.name: info for info in outputs_of(interface)}
    return [
        make(name, np.array([value], NUMPY_TYPES[infos[name].triton_type])) for name, value in values.items()
    ]
