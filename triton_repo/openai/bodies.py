"""Requests of OpenAI's interface to inputs of a Triton model. Fields that are not served are refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from runtime.core import prompts
from runtime.core.errors import RequestError
from runtime.core.prompts import encode_utf8
from triton_repo.openai.tool_calls import ToolForm, ToolParser
from triton_repo.openai.tools import (
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    TOOL_CHOICE,
    TOOLS,
    Guide,
    Tools,
    read_calls,
    read_guide,
    read_tools,
)
from triton_repo.web.json_body import BOOL, SHOWN, Kind, shown

# Fields that change nothing in the answer.
IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key"}
# Fields that are accepted with these values only, which ask for nothing more. Every field may be null.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
# OpenAI's defaults. A Triton model's own temperature is 0.
DEFAULTS: dict[str, Any] = {"temperature": 1.0}
DEFAULT_COMPLETION_TOKENS = 16
ROLES = {
    **{role: prompts.ROLES[role] for role in ("system", "developer", "user", "assistant")},
    prompts.TOOL: prompts.TOOL,
}
# The fields of messages, by their role.
SHARED = ("role", "content", "name")
OF_MESSAGES = {prompts.ASSISTANT: (*SHARED, "tool_calls"), prompts.TOOL: (*SHARED, "tool_call_id")}


class TextPart(Struct, tag="text"):
    """A part of a message. ``type`` is its tag."""

    text: str


MESSAGES = Kind(Annotated[list, Meta(min_length=1)], "a list with at least one message")
ROLE = Kind(Literal[tuple(ROLES)], f"one of {', '.join(ROLES)}")
CONTENT = Kind(
    str | Annotated[list[TextPart], Meta(min_length=1)],
    'text, or a list of parts such as {"type": "text", "text": "Hi"}',
)
TOOL_CALL_ID = Kind(str, "the id of a call")
# Requests to Triton that one request may become: its prompts times its ``n``.
MAX_CHOICES = 32
# OpenAI's limit.
MAX_TOP_LOG_PROBS = 20
TOP = Kind(
    Annotated[int, Meta(ge=0, le=MAX_TOP_LOG_PROBS)], f"a whole number between 0 and {MAX_TOP_LOG_PROBS}"
)
INT32 = Kind(Annotated[int, Meta(ge=-(2**31), lt=2**31)], "a whole number of 32 bits")
NUMBER = Kind(Annotated[float, Meta(ge=-3e38, le=3e38)], "a number")
IDS = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(min_length=1)]
PROMPT = Kind(str | IDS, "a string, a list of token ids, or a list of either")
PROMPTS = Kind(Annotated[list[str | IDS], Meta(min_length=1)], PROMPT.words)
SEED = Kind(int, "a whole number between -2^63 and 2^64 - 1")
COUNT = Kind(Annotated[int, Meta(ge=1)], "a whole number of at least 1")
WORD = Annotated[str, Meta(min_length=1)]
STOP = Kind(WORD | list[WORD], "a string or a list of strings, none of them empty")
# The models take only values above 0.
LEAST_TOP_P = 1e-9
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


@dataclass(frozen=True)
class OpenAIRequest:
    """A request that has been read.

    inputs: those of one Triton request for every choice; the ``num_choices`` of a prompt follow each other
    log_probs: whether the log-probabilities of the tokens are wanted
    num_top: the most probable tokens that are wanted with each of them
    echo: whether an answer begins with its prompt
    guide_field: the field of the body that says what the output has to be
    tools: those that the model may call, in the form ``tool_form``; None for none
    """

    inputs: tuple[dict[str, Any], ...]
    num_choices: int
    stream: bool
    include_usage: bool
    log_probs: bool = False
    num_top: int = 0
    echo: bool = False
    guide_field: str | None = None
    tools: Tools | None = None
    tool_form: ToolForm | None = None

    def parser(self) -> ToolParser | None:
        """Reads the calls in one choice; None where there cannot be any."""
        if self.tools is None or self.tool_form is None:
            return None
        return ToolParser(self.tool_form, self.tools.names, is_parallel=self.tools.is_parallel)


def read_chat(body: Mapping[str, Any], tool_form: ToolForm | None = None) -> OpenAIRequest:
    """Read the body of ``/v1/chat/completions``. Raises RequestError that names the field.

    tool_form: how the model writes calls of tools; None if that is not known
    """
    fields = _Fields(body)
    conversation = _messages(fields.take("messages"))
    options = fields.take("chat_template_kwargs", Kind(dict, "a JSON object")) or {}
    log_probs = fields.take("logprobs", BOOL) or False
    num_top = fields.take("top_logprobs", TOP) or 0
    if num_top and not log_probs:
        raise RequestError(f"needs logprobs to be true, got {num_top}", field="top_logprobs")
    # ``max_completion_tokens`` is the newer name.
    older, newer = fields.take("max_tokens", INT32), fields.take("max_completion_tokens", INT32)
    parallel = fields.take("parallel_tool_calls", BOOL)
    tools = read_tools(fields.take(TOOLS), fields.take(TOOL_CHOICE), parallel, tool_form)
    if tools is not None:
        if TOOLS in options:
            raise RequestError("must not be given together with tools", field="chat_template_kwargs.tools")
        options = {**options, TOOLS: tools.tools}
    text = json.dumps(conversation, ensure_ascii=False)
    prompt = {"messages": encode_utf8("messages", text)}
    prompt |= {"template_options": json.dumps(options).encode()} if options else {}
    count = older if newer is None else newer
    guide = None if tools is None else tools.guide(tool_form)
    asked = _request(fields, [prompt], count, log_probs, num_top, guide=guide)
    return replace(asked, tools=tools, tool_form=tool_form)


def read_completion(body: Mapping[str, Any]) -> OpenAIRequest:
    """Read the body of ``/v1/completions``. Raises RequestError that names the field."""
    fields = _Fields(body)
    special = fields.take("add_special_tokens", BOOL)
    prompts = _prompts(fields.take("prompt"), {} if special is None else {"add_special_tokens": special})
    num_top = fields.take("logprobs", TOP)
    echo = fields.take("echo", BOOL) or False
    count = fields.take("max_tokens", INT32)
    count = DEFAULT_COMPLETION_TOKENS if count is None else count
    return _request(fields, prompts, count, num_top is not None, num_top or 0, echo)


def _prompts(value: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs of every prompt: of a text or token ids, or of a list of either.

    options: those of a text
    """
    is_one = isinstance(value, str) or (isinstance(value, list) and any(type(each) is int for each in value))
    prompts = (PROMPT if is_one else PROMPTS).read("prompt", value)
    return [
        {"text_input": encode_utf8("prompt", prompt), "raw": True, **options}
        if isinstance(prompt, str)
        else {"input_ids": prompt}
        for prompt in ([prompts] if is_one else prompts)
    ]


def _request(
    fields: "_Fields",
    prompts: list[dict[str, Any]],
    count: int | None,
    log_probs: bool,
    num_top: int,
    echo: bool = False,
    guide: Guide | None = None,
) -> OpenAIRequest:
    """Read the fields that both kinds of requests have, and refuse the others.

    guide: what the output has to be because of other fields
    """
    stream = fields.take("stream", BOOL) or False
    if echo and stream:
        raise RequestError("must be false in a stream, got true", field="echo")
    usage = _stream_options(fields.take("stream_options"), stream)
    inputs: dict[str, Any] = {**DEFAULTS, **({} if count is None else {"max_tokens": count})}
    for name, kind in SAMPLING.items():
        value = fields.take(name, kind)
        inputs |= {} if value is None else {name: value}
    if inputs.get("top_k") == -1:  # how clients of vLLM turn it off
        inputs["top_k"] = 0
    if inputs.get("top_p") == 0:  # the most probable token alone
        inputs["top_p"] = LEAST_TOP_P
    bias = fields.take("logit_bias", Kind(dict, "a JSON object of token ids and numbers"))
    inputs |= {"logit_bias": json.dumps(bias)} if bias else {}
    stop = fields.take("stop", STOP) or []
    words = [encode_utf8("stop", word) for word in ([stop] if isinstance(stop, str) else stop)]
    inputs |= {"stop_words": words} if words else {}
    seed = fields.take("seed", SEED)
    if seed is not None and not -(2**63) <= seed < 2**64:  # beyond what msgspec compares
        raise _wrong("seed", SEED.words, seed)
    choices = fields.take("n", COUNT)
    choices = 1 if choices is None else choices
    if choices * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"times the number of prompts must be at most {MAX_CHOICES}, got {choices * len(prompts)}",
            field="n",
        )
    other = read_guide(fields.take(RESPONSE_FORMAT), fields.take(STRUCTURED_OUTPUTS))
    if other is not None and guide is not None:
        raise RequestError("must not be given where a tool has to be called", field=other.field)
    guide = other or guide
    inputs |= {} if guide is None else guide.inputs()
    fields.refuse_rest()
    inputs |= {"stream": stream, "return_log_probs": log_probs}
    inputs |= {"top_log_probs": num_top} if num_top else {}
    inputs |= {"prompt_log_probs": True} if echo else {}
    requests = []
    for prompt in prompts:
        for index in range(choices):
            # One seed would draw the same text for every choice.
            seeded = {} if seed is None else {"seed": (seed + index) % 2**64}
            requests.append({**inputs, **prompt, **seeded})
    field = None if guide is None else guide.field
    return OpenAIRequest(tuple(requests), choices, stream, usage, log_probs, num_top, echo, field)


class _Fields:
    """The fields of a body, each taken once. A field that is null is absent."""

    def __init__(self, body: Mapping[str, Any]):
        self._left = {name: value for name, value in body.items() if value is not None}
        self._left.pop("model", None)

    def take(self, name: str, kind: Kind | None = None) -> Any:
        value = self._left.pop(name, None)
        return value if kind is None or value is None else kind.read(name, value)

    def refuse_rest(self) -> None:
        for name, value in self._left.items():
            if name in IGNORED or value in ONLY.get(name, ()):
                continue
            if name in ONLY:
                allowed = " or ".join(json.dumps(only) for only in ONLY[name])
                raise _wrong(name, f"{allowed}, because nothing else is supported", value)
            raise RequestError(f"is not supported by this server, got {shown(value)}", field=name[:SHOWN])


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
    given = value.get("include_usage")
    return given is not None and bool(BOOL.read("stream_options.include_usage", given))


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages with a role that chat templates know, and text. Parts of a text are joined by line ends."""
    found = []
    for index, message in enumerate(MESSAGES.read("messages", value)):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise _wrong(where, "an object with role and content", message)
        role = ROLES[ROLE.read(f"{where}.role", message.get("role"))]
        for name, given in message.items():
            if name not in OF_MESSAGES.get(role, SHARED) and given not in (None, [], ""):
                raise RequestError(
                    f"is not supported by this server, got {shown(given)}", field=f"{where}.{name[:SHOWN]}"
                )
        content = message.get("content")
        if role == prompts.ASSISTANT and content is None:
            content = "" if "content" in message or message.get("tool_calls") is not None else None
        content = CONTENT.read(f"{where}.content", content)
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        read = {"role": role, "content": content, "name": message.get("name")}
        if message.get("tool_calls"):
            read["tool_calls"] = read_calls(f"{where}.tool_calls", message["tool_calls"])
        if role == prompts.TOOL:
            read["tool_call_id"] = TOOL_CALL_ID.read(f"{where}.tool_call_id", message.get("tool_call_id"))
        found.append(read)
    return found


def _wrong(name: str, expected: str, value: Any) -> RequestError:
    return RequestError(f"must be {expected}, got {shown(value)}", field=name)
