"""The server's side of a request: input tensors to the runtime's options, chunks to output tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.errors import RequestError, UserError
from runtime.core.prompts import MessageError, read_conversation
from runtime.decode.grammar import Grammar
from runtime.decode.sampling_params import SamplingParams
from runtime.decode.sequence import Piece
from triton_repo.triton.tensors import (
    COMPLETIONS,
    LEAST_LOG_PROB,
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


def error_message(interface: str, error: UserError) -> str:
    """A runtime error's message, with the tensor's name in place of the runtime option's."""
    tensors = {
        "prompt": PROMPTS[interface].name,
        "max_new_tokens": "max_tokens",
        "stop_strings": "stop_words",
        "grammar": "guided_decoding_guide",
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
    if array.size > MAX_ELEMENTS:
        raise RequestError(f"must have at most {MAX_ELEMENTS} elements, got {array.size}", field=info.name)
    values = array.reshape(-1).tolist()
    if expected is np.object_ and (size := sum(map(len, values))) > MAX_BYTES:
        raise RequestError(f"must be at most {MAX_BYTES} bytes long, got {size}", field=info.name)
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


def scores_json(pieces: Sequence[Piece], text_of: Callable[[int], str]) -> str:
    """Tokens as JSON: for each its text, its log-probability, and the most probable tokens with theirs.

    text_of: the text of one token
    """
    rows = [
        [
            piece.text,
            _finite(piece.log_prob),
            [[text_of(token), _finite(value)] for token, value in piece.top],
        ]
        for piece in pieces
    ]
    return json.dumps(rows)


def _finite(log_prob: float | None) -> float | None:
    return None if log_prob is None else max(log_prob, LEAST_LOG_PROB)


def response_tensors(
    interface: str,
    completion: str | list[int],
    *,
    log_probs: list[float] | None,
    tokens: list[str],
    cum_log_prob: float,
    num_input_tokens: int,
    num_cached_tokens: int,
    num_output_tokens: int,
    num_steps: int,
    num_drafted_tokens: int,
    num_accepted_tokens: int,
    finish_reason: str | None,
    token_scores: str | None = None,
    prompt_scores: str | None = None,
) -> dict[str, NDArray[Any]]:
    """A response's tensors by name.

    Every array has a batch axis of size 1. ``text_output`` has no other axis, because clients of the
    TensorRT-LLM backend read ``as_numpy("text_output")[0].decode()``.

    completion, log_probs, tokens: the part since the last response; the other values are of the whole output
        so far. The tokens' texts are returned with the log-probabilities.
    token_scores, prompt_scores: the JSON of ``scores_json``, of the new tokens and of the prompt's
    """
    values: dict[str, Any] = {
        COMPLETIONS[interface].name: completion.encode() if isinstance(completion, str) else completion,
        "sequence_index": [0],
        "num_input_tokens": [num_input_tokens],
        "num_cached_tokens": [num_cached_tokens],
        "num_output_tokens": [num_output_tokens],
        "num_steps": [num_steps],
        "num_drafted_tokens": [num_drafted_tokens],
        "num_accepted_tokens": [num_accepted_tokens],
        "acceptance_length": [(num_output_tokens - 1) / num_steps if num_steps else 1.0],
        "finish_reason": [(finish_reason or "").encode()],
    }
    if log_probs is not None:
        values |= {"cum_log_probs": [cum_log_prob], "output_log_probs": log_probs}
        values["output_tokens"] = [token.encode() for token in tokens]
    for name, text in (("token_scores", token_scores), ("prompt_scores", prompt_scores)):
        values |= {} if text is None else {name: [text.encode()]}
    infos = {info.name: info for info in outputs_of(interface)}
    return {name: np.array([value], NUMPY_TYPES[infos[name].triton_type]) for name, value in values.items()}
