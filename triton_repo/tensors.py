"""The tensors of both models: names, types, and how a request's become the runtime's options.

Names and meanings are those of the TensorRT-LLM backend's ``ensemble``, so that its clients work unchanged;
the tokens model has the same. ``logit_bias``, ``min_p``, ``raw``, ``acceptance_length`` and ``num_steps`` are
ours.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.decoding.sampling import SamplingParams
from runtime.errors import RequestError

TEXT, TOKENS = "text", "tokens"
INTERFACES = (TEXT, TOKENS)


@dataclass(frozen=True)
class TensorInfo:
    """One input or output of ``config.pbtxt``; a size of -1 takes any number of elements."""

    name: str
    triton_type: str
    size: int = 1
    optional: bool = True

    @property
    def datatype(self) -> str:
        """The type's name in a request: ``BYTES`` for a string, otherwise without the prefix."""
        return {"TYPE_STRING": "BYTES"}.get(self.triton_type, self.triton_type.removeprefix("TYPE_"))


PROMPTS = {
    TEXT: TensorInfo("text_input", "TYPE_STRING", optional=False),
    TOKENS: TensorInfo("input_ids", "TYPE_INT32", size=-1, optional=False),
}
OPTIONS = (
    TensorInfo("max_tokens", "TYPE_INT32", optional=False),
    TensorInfo("stop_words", "TYPE_STRING", size=-1),
    TensorInfo("end_id", "TYPE_INT32"),
    TensorInfo("temperature", "TYPE_FP32"),
    TensorInfo("top_k", "TYPE_INT32"),
    TensorInfo("top_p", "TYPE_FP32"),
    TensorInfo("min_p", "TYPE_FP32"),
    TensorInfo("repetition_penalty", "TYPE_FP32"),
    TensorInfo("presence_penalty", "TYPE_FP32"),
    TensorInfo("frequency_penalty", "TYPE_FP32"),
    TensorInfo("logit_bias", "TYPE_STRING"),
    TensorInfo("seed", "TYPE_UINT64"),
    TensorInfo("stream", "TYPE_BOOL"),
    TensorInfo("raw", "TYPE_BOOL"),
    TensorInfo("exclude_input_in_output", "TYPE_BOOL"),
    TensorInfo("return_log_probs", "TYPE_BOOL"),
    TensorInfo("num_return_sequences", "TYPE_INT32"),
    TensorInfo("beam_width", "TYPE_INT32"),
    TensorInfo("num_draft_tokens", "TYPE_INT32"),
    TensorInfo("use_draft_logits", "TYPE_BOOL"),
    TensorInfo("return_context_logits", "TYPE_BOOL"),
    TensorInfo("return_generation_logits", "TYPE_BOOL"),
    TensorInfo("return_perf_metrics", "TYPE_BOOL"),
    TensorInfo("return_num_input_tokens", "TYPE_BOOL"),
    TensorInfo("return_num_output_tokens", "TYPE_BOOL"),
    TensorInfo("bad_words", "TYPE_STRING", size=-1),
    TensorInfo("pad_id", "TYPE_INT32"),
    TensorInfo("length_penalty", "TYPE_FP32"),
)
ANSWERS = {
    TEXT: TensorInfo("text_output", "TYPE_STRING", size=-1),
    TOKENS: TensorInfo("output_ids", "TYPE_INT32", size=-1),
}
STATISTICS = (
    TensorInfo("cum_log_probs", "TYPE_FP32"),
    TensorInfo("output_log_probs", "TYPE_FP32", size=-1),
    TensorInfo("sequence_index", "TYPE_INT32"),
    TensorInfo("num_input_tokens", "TYPE_INT32"),
    TensorInfo("num_output_tokens", "TYPE_INT32"),
    TensorInfo("num_steps", "TYPE_INT32"),
    TensorInfo("acceptance_length", "TYPE_FP32"),
    TensorInfo("finish_reason", "TYPE_STRING"),
)
NUMPY_TYPES: dict[str, Any] = {
    "TYPE_STRING": np.object_,
    "TYPE_INT32": np.int32,
    "TYPE_FP32": np.float32,
    "TYPE_UINT64": np.uint64,
    "TYPE_BOOL": np.bool_,
}
# Fields of ``SamplingParams`` that are inputs as they are.
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
# These exist so that clients which send them work, and have to have these values. Whatever ``pad_id``,
# ``length_penalty``, ``return_num_input_tokens`` and ``return_num_output_tokens`` are, they change nothing:
# there is no padding, lengths count among beams, and the numbers of tokens always come.
ONLY: dict[str, int] = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "num_draft_tokens": 0,
    "use_draft_logits": False,
    "return_context_logits": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
}
# A bias for every token of a large vocabulary is not as long.
MAX_LOGIT_BIAS = 1 << 22


def inputs_of(interface: str) -> tuple[TensorInfo, ...]:
    return (PROMPTS[interface], *OPTIONS)


def outputs_of(interface: str) -> tuple[TensorInfo, ...]:
    return (ANSWERS[interface], *STATISTICS)


@dataclass(frozen=True)
class GenerateRequest:
    """A request's tensors, read.

    prompt: text, or token ids; end_id: in place of the model's own end-of-text tokens
    raw: whether the text is to be continued as it is, without the chat template
    echo: whether the prompt comes before the output; a stream is of the output alone
    """

    prompt: str | list[int]
    max_new_tokens: int
    stop_strings: tuple[str, ...]
    end_id: int | None
    sampling: SamplingParams
    stream: bool
    raw: bool
    echo: bool


def read_request(interface: str, tensors: Mapping[str, NDArray[Any]]) -> GenerateRequest:
    """tensors: the request's inputs by name, as Triton passes them, batch axis and all.

    Raises RequestError that names the tensor, what was expected and what came.
    """
    known = {info.name: info for info in inputs_of(interface)}
    for name in tensors:
        if name not in known:
            raise RequestError(f"{name}: is no input of this model; it has {', '.join(known)}")
    found = {name: _values(known[name], array) for name, array in tensors.items()}
    for info in known.values():
        if not info.optional and info.name not in found:
            raise RequestError(f"{info.name}: is missing")
    scalar: dict[str, Any] = {name: values[0] for name, values in found.items() if known[name].size == 1}
    for name, only in ONLY.items():
        if scalar.get(name, only) != only:
            raise RequestError(f"{name}: must be {only}, got {scalar[name]}")
    if any(found.get("bad_words", [])):
        raise RequestError("bad_words: must be empty; logit_bias can keep a token out")
    sampling: dict[str, Any] = {name: scalar[name] for name in SAMPLING if name in scalar}
    if "logit_bias" in scalar:
        sampling["logit_bias"] = _logit_bias(scalar["logit_bias"])
    prompt = PROMPTS[interface].name
    stream = scalar.get("stream", False)
    return GenerateRequest(
        prompt=scalar[prompt] if interface == TEXT else found[prompt],
        max_new_tokens=scalar["max_tokens"],
        stop_strings=tuple(word for word in found.get("stop_words", []) if word),
        end_id=scalar.get("end_id"),
        sampling=SamplingParams(**sampling, log_probs=scalar.get("return_log_probs", False)),
        stream=stream,
        raw=scalar.get("raw", False),
        echo=not (stream or scalar.get("exclude_input_in_output", True)),
    )


def by_tensor(interface: str, error: Exception) -> str:
    """An error of the runtime's, with the tensor's name in place of the option's."""
    names = {
        "prompt": PROMPTS[interface].name,
        "max_new_tokens": "max_tokens",
        "stop_strings": "stop_words",
    }
    name, _, rest = str(error).partition(":")
    return f"{names.get(name, name)}:{rest}" if rest else name


def _values(info: TensorInfo, array: NDArray[Any]) -> list[Any]:
    """A tensor's elements as Python values."""
    expected = NUMPY_TYPES[info.triton_type]
    if array.dtype != expected:
        raise RequestError(f"{info.name}: must be {info.triton_type}, got {array.dtype}")
    if info.size == 1 and array.size != 1:
        raise RequestError(f"{info.name}: must have one element, got shape {list(array.shape)}")
    values = array.reshape(-1).tolist()
    return [_text(info.name, value) for value in values] if expected is np.object_ else values


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = value[error.start]
        raise RequestError(f"{name}: must be UTF-8 text, got byte {byte:#04x} at {error.start}") from None


def _logit_bias(text: str) -> dict[int, float]:
    """``{"17": -2.5}``"""
    expected = 'a JSON object of token ids and numbers, such as {"17": -2.5}'
    if len(text) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias: must be at most {MAX_LOGIT_BIAS} characters long, got {len(text)}")
    try:
        found = json.loads(text)
        return {int(token): float(bias) for token, bias in found.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RequestError(f"logit_bias: must be {expected}, got {text[:80]!r}") from error


def answer_tensors(
    interface: str,
    answer: str | list[int],
    *,
    log_probs: list[float] | None,
    cum_log_prob: float,
    num_input_tokens: int,
    num_output_tokens: int,
    num_steps: int,
    finish_reason: str | None,
    make: Callable[[str, NDArray[Any]], Any],
) -> list[Any]:
    """A response's tensors, by ``make(name, array)``; every array has the batch axis, of size 1.

    A text has no other: TensorRT-LLM's clients read ``as_numpy("text_output")[0].decode()``.
    answer, log_probs: of what is new; the numbers are those of the whole output so far
    """
    values: dict[str, Any] = {
        ANSWERS[interface].name: answer.encode("utf-8") if isinstance(answer, str) else answer,
        "sequence_index": [0],
        "num_input_tokens": [num_input_tokens],
        "num_output_tokens": [num_output_tokens],
        "num_steps": [num_steps],
        "acceptance_length": [(num_output_tokens - 1) / num_steps if num_steps else 1.0],
        "finish_reason": [(finish_reason or "").encode()],
    }
    if log_probs is not None:
        values |= {"cum_log_probs": [cum_log_prob], "output_log_probs": log_probs}
    infos = {info.name: info for info in outputs_of(interface)}
    return [
        make(name, np.array([value], NUMPY_TYPES[infos[name].triton_type])) for name, value in values.items()
    ]
