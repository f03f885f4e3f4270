"""The server's side of a request: its tensors to the runtime's options, and its errors to messages."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import DeviceError, RequestError, UserError
from runtime.core.prompts import MessageError, read_conversation
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import SamplingParams
from runtime.serve.request import CancelledError, UnavailableError
from triton_repo.triton.tensors import (
    CANCELLED,
    INTERNAL,
    INVALID,
    NUMPY_TYPES,
    ONLY,
    OPTIONS,
    PROMPTS,
    TEXT,
    UNAVAILABLE,
    TensorInfo,
    inputs_of,
)

# Tensors that are fields of ``SamplingParams`` as they are.
SAMPLING = {info.name for info in OPTIONS} & {field.name for field in fields(SamplingParams)} - {"logit_bias"}
# Characters of JSON: enough for a bias on every token of a large vocabulary.
MAX_LOGIT_BIAS = 1 << 22
# Of one tensor: bytes of its texts, as of a body of HTTP, and elements. Triton has no limit, and reading
# gigabytes would keep the process from anything else for so long that it seems to hang.
MAX_BYTES, MAX_ELEMENTS = 8 << 20, 1 << 20


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
    prompt_log_probs: return the prompt's tokens with their log-probabilities
    grammar: what the output has to be; None for anything
    """

    prompt: str | list[int]
    messages: list[dict[str, Any]] | None
    template_options: dict[str, Any]
    max_new_tokens: int | None
    stop_strings: tuple[str, ...]
    end_id: int | None
    sampling: SamplingParams
    stream: bool
    raw: bool
    add_special_tokens: bool
    echo: bool
    prompt_log_probs: bool
    grammar: Grammar | None

    @property
    def prompt_tensor(self) -> str:
        """The name of the tensor that has the prompt."""
        if self.messages is not None:
            return "messages"
        return "text_input" if isinstance(self.prompt, str) else "input_ids"


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
    if interface == TEXT:
        _check_prompts(values)
    return GenerateRequest(
        prompt=values["input_ids"] if "input_ids" in values else scalars.get("text_input", ""),
        messages=_messages(scalars["messages"]) if "messages" in scalars else None,
        template_options=_json_object("template_options", scalars.get("template_options", "{}")),
        max_new_tokens=scalars.get("max_tokens"),
        stop_strings=tuple(word for word in values.get("stop_words", []) if word),
        end_id=scalars.get("end_id"),
        sampling=SamplingParams(**sampling, log_probs=scalars.get("return_log_probs", False)),
        stream=stream,
        raw=scalars.get("raw", False),
        add_special_tokens=scalars.get("add_special_tokens", True),
        echo=not (stream or scalars.get("exclude_input_in_output", True)),
        prompt_log_probs=scalars.get("prompt_log_probs", False),
        grammar=_grammar(scalars),
    )


# The prompts of a text model, and the options that are for one of them alone.
TEXT_PROMPTS = ("text_input", "messages", "input_ids")
OPTIONS_OF = {
    "template_options": "messages",
    "raw": "text_input",
    "add_special_tokens": "text_input",
}


def _check_prompts(values: Mapping[str, Any]) -> None:
    """Raises RequestError unless a text model has one prompt, and options that it can follow."""
    given = [name for name in TEXT_PROMPTS if name in values]
    if not given:
        raise RequestError("is missing, and messages too; one of them is needed", field="text_input")
    if len(given) > 1:
        raise RequestError(f"must not be given together with {given[0]}", field=given[1])
    for name, prompt in OPTIONS_OF.items():
        if name in values and given != [prompt]:
            raise RequestError(f"is for {prompt}, got {given[0]}", field=name)
    if given == ["input_ids"] and values.get("exclude_input_in_output") == [False]:
        problem = "must be true with input_ids; prompt_log_probs returns their texts"
        raise RequestError(problem, field="exclude_input_in_output")


def _grammar(scalars: Mapping[str, Any]) -> Grammar | None:
    kind, text = scalars.get("guided_decoding_guide_type"), scalars.get("guided_decoding_guide")
    if kind is None:
        if text is not None:
            raise RequestError("is missing for this guide", field="guided_decoding_guide_type")
        return None
    return Grammar(kind, text or "")


def _messages(text: str) -> list[dict[str, Any]]:
    """The conversation."""
    try:
        return read_conversation(json.loads(text))
    except MessageError as error:
        raise RequestError(str(error), field="messages") from error
    except (ValueError, RecursionError) as error:
        expected = 'a JSON list of messages such as [{"role": "user", "content": "Hi"}]'
        raise RequestError(f"must be {expected}, got {text[:80]!r}", field="messages") from error


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(f"must be a JSON object, got {text[:80]!r}", field=name)
    return value


def failure(interface: str, error: Exception) -> tuple[str, str]:
    """Why a request ends with this error, as the metrics count it, and the message for its client.

    The message has the tensor's name in place of the runtime option's.
    """
    if isinstance(error, UnavailableError):
        return UNAVAILABLE, str(error)
    if isinstance(error, CancelledError):
        return CANCELLED, str(error)
    if isinstance(error, DeviceError):  # the model gets a new process, so another attempt may succeed
        return INTERNAL, str(error)
    if not isinstance(error, UserError):
        return INTERNAL, f"internal error: {error!r}"
    tensors = {
        "prompt": PROMPTS[interface].name,
        "max_new_tokens": "max_tokens",
        "stop_strings": "stop_words",
        "grammar": "guided_decoding_guide",
    }
    name = tensors.get(error.field or "", error.field)
    return INVALID, str(UserError(error.problem, field=name))


def _values(info: TensorInfo, array: NDArray[Any]) -> list[Any]:
    """A tensor's elements as Python values."""
    expected = NUMPY_TYPES[info.triton_type]
    if array.dtype != expected:
        raise RequestError(f"must be {info.triton_type}, got {array.dtype}", field=info.name)
    if info.size == 1 and array.size != 1:
        raise RequestError(f"must have one element, got shape {list(array.shape)}", field=info.name)
    if array.size > MAX_ELEMENTS:
        raise RequestError(f"must have at most {MAX_ELEMENTS} elements, got {array.size}", field=info.name)
    values = array.reshape(-1).tolist()
    if expected is np.object_ and (size := sum(map(len, values))) > MAX_BYTES:
        raise RequestError(f"must be at most {MAX_BYTES} bytes long, got {size}", field=info.name)
    if expected is np.object_:
        return [_text(info.name, value) for value in values]
    # The shortest number that is this float32: 0.01, and not 0.009999999776482582.
    return [float(str(value)) for value in array.reshape(-1)] if expected is np.float32 else values


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
