"""Bodies of OpenAI's interface: requests to inputs of a Triton model, and its responses to answers.

A field that is not served is refused by its name.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core import messages
from runtime.core.errors import RequestError
from runtime.core.prompts import encode_utf8
from triton_repo.triton.tensors import LEAST_LOG_PROB
from triton_repo.web.json_body import SHOWN, shown

# Fields that change nothing in the answer.
IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
# Fields that are accepted with these values only, which ask for nothing more. Every field may be null.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
# OpenAI's defaults. A Triton model's own temperature is 0.
DEFAULTS: dict[str, Any] = {"temperature": 1.0}
DEFAULT_COMPLETION_TOKENS = 16
ROLES = {role: messages.ROLES[role] for role in ("system", "developer", "user", "assistant")}
CONTENT = 'text, or a list of parts such as {"type": "text", "text": "Hi"}'
# Requests to Triton that one request may become: its prompts times its ``n``.
MAX_CHOICES = 32


@dataclass(frozen=True)
class OpenAIRequest:
    """A request that has been read.

    inputs: those of one Triton request for every choice; the ``num_choices`` of a prompt follow each other
    """

    inputs: tuple[dict[str, Any], ...]
    num_choices: int
    stream: bool
    include_usage: bool
    log_probs: bool


def read_chat(body: Mapping[str, Any]) -> OpenAIRequest:
    """Read the body of ``/v1/chat/completions``. Raises RequestError that names the field."""
    fields = _Fields(body)
    conversation = _messages(fields.take("messages"))
    options = fields.take("chat_template_kwargs", _kind("a JSON object", dict)) or {}
    log_probs = fields.take("logprobs", BOOL) or False
    # ``max_completion_tokens`` is the newer name.
    older, newer = fields.take("max_tokens", INT32), fields.take("max_completion_tokens", INT32)
    text = json.dumps(conversation, ensure_ascii=False)
    prompt = {"messages": encode_utf8("messages", text)}
    prompt |= {"template_options": json.dumps(options).encode()} if options else {}
    return _request(fields, [prompt], older if newer is None else newer, log_probs)


def read_completion(body: Mapping[str, Any]) -> OpenAIRequest:
    """Read the body of ``/v1/completions``. Raises RequestError that names the field."""
    fields = _Fields(body)
    prompts = fields.take("prompt")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not (isinstance(prompts, list) and prompts and all(isinstance(text, str) for text in prompts)):
        raise _wrong("prompt", "a string or a list of strings", prompts)
    log_probs = fields.take("logprobs", INT32)
    if log_probs:
        raise _wrong("logprobs", "0, for the tokens of the text alone", log_probs)
    special = fields.take("add_special_tokens", BOOL)
    options = {"raw": True, **({} if special is None else {"add_special_tokens": special})}
    count = fields.take("max_tokens", INT32)
    count = DEFAULT_COMPLETION_TOKENS if count is None else count
    inputs = [{"text_input": encode_utf8("prompt", text), **options} for text in prompts]
    return _request(fields, inputs, count, log_probs is not None)


def _request(
    fields: "_Fields", prompts: list[dict[str, Any]], count: int | None, log_probs: bool
) -> OpenAIRequest:
    """Read the fields that both kinds of requests have, and refuse the others."""
    stream = fields.take("stream", BOOL) or False
    usage = _stream_options(fields.take("stream_options"), stream)
    inputs: dict[str, Any] = {**DEFAULTS, **({} if count is None else {"max_tokens": count})}
    for name, kind in SAMPLING.items():
        value = fields.take(name, kind)
        inputs |= {} if value is None else {name: value}
    if inputs.get("top_k") == -1:  # how clients of vLLM turn it off
        inputs["top_k"] = 0
    bias = fields.take("logit_bias", _kind("a JSON object of token ids and numbers", dict))
    inputs |= {"logit_bias": json.dumps(bias)} if bias else {}
    stop = fields.take("stop")
    stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not (isinstance(stop, list) and all(isinstance(word, str) and word for word in stop)):
        raise _wrong("stop", "a string or a list of strings, none of them empty", stop)
    inputs |= {"stop_words": [encode_utf8("stop", word) for word in stop]} if stop else {}
    seed = fields.take("seed", _kind("a whole number between 0 and 2^64 - 1", int, 0, 2**64 - 1))
    choices = fields.take("n", _kind("a whole number of at least 1", int, 1))
    choices = 1 if choices is None else choices
    if choices * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"times the number of prompts must be at most {MAX_CHOICES}, got {choices * len(prompts)}",
            field="n",
        )
    fields.refuse_rest()
    inputs |= {"stream": stream, "return_log_probs": log_probs}
    requests = []
    for prompt in prompts:
        for index in range(choices):
            # One seed would draw the same text for every choice.
            seeded = {} if seed is None else {"seed": (seed + index) % 2**64}
            requests.append({**inputs, **prompt, **seeded})
    return OpenAIRequest(tuple(requests), choices, stream, usage, log_probs)


class _Fields:
    """The fields of a body, each taken once. A field that is null is absent."""

    def __init__(self, body: Mapping[str, Any]):
        self._left = {name: value for name, value in body.items() if value is not None}
        self._left.pop("model", None)

    def take(self, name: str, check: Callable[[str, Any], Any] | None = None) -> Any:
        value = self._left.pop(name, None)
        return value if check is None or value is None else check(name, value)

    def refuse_rest(self) -> None:
        for name, value in self._left.items():
            if name in IGNORED or value in ONLY.get(name, ()):
                continue
            if name in ONLY:
                allowed = " or ".join(json.dumps(only) for only in ONLY[name])
                raise _wrong(name, f"{allowed}, because nothing else is supported", value)
            raise RequestError(f"is not supported by this server, got {shown(value)}", field=name[:SHOWN])


def _kind(
    expected: str, kind: type, least: float | None = None, most: float | None = None
) -> Callable[[str, Any], Any]:
    """A check of a field's type and range."""
    kinds = (int, float) if kind is float else (kind,)

    def check(name: str, value: Any) -> Any:
        wrong = not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool)
        if wrong or (least is not None and value < least) or (most is not None and value > most):
            raise _wrong(name, expected, value)
        return value

    return check


BOOL = _kind("true or false", bool)
INT32 = _kind("a whole number of 32 bits", int, -(2**31), 2**31 - 1)
NUMBER = _kind("a number", float, -3e38, 3e38)
# The fields that are inputs of a Triton model under the same name. The model checks their values.
SAMPLING = {
    "temperature": NUMBER,
    "top_p": NUMBER,
    "min_p": NUMBER,
    "top_k": INT32,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
}


def _stream_options(value: Any, stream: bool) -> bool:
    """Whether the last event of a stream reports the usage."""
    if value is None:
        return False
    if not stream:
        raise RequestError(f"needs stream to be true, got {shown(value)}", field="stream_options")
    expected = 'an object such as {"include_usage": true}'
    names = {"include_usage", "include_obfuscation"}
    if not isinstance(value, dict) or value.keys() - names or value.get("include_obfuscation"):
        raise _wrong("stream_options", expected, value)
    return bool(BOOL("stream_options.include_usage", value.get("include_usage", False)))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages with a role that chat templates know, and text. Parts of a text are joined by line ends."""
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list with at least one message", value)
    found = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _wrong(where, "an object with role and content", message)
        try:
            role = messages.read_role(message, roles=ROLES)
        except messages.MessageError as error:
            raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", message.get("role")) from error
        for name, given in message.items():
            if name not in ("role", "content", "name") and given not in (None, [], ""):
                raise RequestError(
                    f"is not supported by this server, got {shown(given)}", field=f"{where}.{name[:SHOWN]}"
                )
        try:
            content = messages.read_content(message, separator="\n")
        except messages.MessageError as error:
            raise _wrong(f"{where}.content", CONTENT, message.get("content")) from error
        if message["content"] == []:
            raise _wrong(f"{where}.content", CONTENT, [])
        found.append({"role": role, "content": content, "name": message.get("name")})
    return found


def _wrong(name: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"must be {expected}, got {shown(value)}", field=name)


@dataclass(frozen=True)
class Form:
    """The names in the answers of one of the two interfaces. prefix: of an answer's identifier"""

    prefix: str
    whole: str
    event: str


CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = Form("cmpl", "text_completion", "text_completion")


@dataclass
class Choice:
    """One text so far."""

    text: str = ""
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    # The tokens' texts and log-probabilities, if the request asked for them.
    tokens: list[str] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """The answer to one request: whole at the end, or as events.

    created: seconds since 1970
    """

    form: Form
    identifier: str
    created: int
    model: str
    request: OpenAIRequest
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in self.request.inputs]

    def add(self, index: int, tensors: Mapping[str, Any]) -> Choice:
        """Take a Triton response; returns what is new in it."""
        new = Choice(
            text=tensors["text_output"][0].decode(),
            finish_reason=tensors["finish_reason"][0].decode() or None,
            num_input_tokens=int(tensors["num_input_tokens"][0]),
            num_output_tokens=int(tensors["num_output_tokens"][0]),
        )
        if self.request.log_probs:
            new.tokens = [token.decode() for token in tensors["output_tokens"]]
            new.log_probs = [max(float(value), LEAST_LOG_PROB) for value in tensors["output_log_probs"]]
        choice = self.choices[index]
        choice.text += new.text
        choice.finish_reason = new.finish_reason
        choice.num_input_tokens, choice.num_output_tokens = new.num_input_tokens, new.num_output_tokens
        choice.tokens += new.tokens
        choice.log_probs += new.log_probs
        return new

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for index, choice in enumerate(self.choices):
            text: dict[str, Any] = {"text": choice.text}
            if self.form == CHAT:
                text = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            choices.append(self._choice(index, text, choice, 0))
        return {**self._object(self.form.whole, choices), "usage": self._usage()}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first text: in a chat, whose turn it is."""
        if self.form == CHAT:
            for index in range(len(self.choices)):
                yield self._event(index, {"delta": {"role": "assistant", "content": ""}}, Choice(), 0)

    def events(self, index: int, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a Triton response: one, or none for a step that completed no character."""
        offset = len(self.choices[index].text)
        new = self.add(index, tensors)
        if new.text or new.tokens or new.finish_reason:
            is_chat = self.form == CHAT
            text = {"delta": {"content": new.text} if new.text else {}} if is_chat else {"text": new.text}
            yield self._event(index, text, new, offset)

    def end(self) -> Iterator[dict[str, Any]]:
        """The events after the last text: the usage, if it was asked for."""
        if self.request.include_usage:
            yield {**self._object(self.form.event, []), "usage": self._usage()}

    def _event(self, index: int, text: dict[str, Any], new: Choice, offset: int) -> dict[str, Any]:
        usage = {"usage": None} if self.request.include_usage else {}
        return {**self._object(self.form.event, [self._choice(index, text, new, offset)]), **usage}

    def _choice(self, index: int, text: dict[str, Any], part: Choice, offset: int) -> dict[str, Any]:
        """text: the part's text in the interface's form; offset: characters of the choice before the part"""
        log_probs = self._log_probs(part, offset) if part.tokens else None
        return {"index": index, **text, "logprobs": log_probs, "finish_reason": part.finish_reason}

    def _log_probs(self, part: Choice, offset: int) -> dict[str, Any]:
        if self.form == CHAT:
            content = [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in zip(part.tokens, part.log_probs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in part.tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": part.tokens,
            "token_logprobs": part.log_probs,
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        """A prompt counts once, whatever the number of its choices."""
        prompt = sum(choice.num_input_tokens for choice in self.choices[:: self.request.num_choices])
        completion = sum(choice.num_output_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
