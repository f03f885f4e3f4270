"""Requests of OpenAI's Responses interface to those of a chat.

Nothing is stored, so a client sends the earlier items of a conversation with every request.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.core.errors import RequestError
from triton_repo.openai.bodies import OpenAIRequest, read_chat
from triton_repo.openai.tool_calls import ToolForm
from triton_repo.openai.tools import RESPONSE_FORMAT, TOOL_CHOICE, TOOLS
from triton_repo.web.json_body import shown

MESSAGE, CALL, OUTPUT = "message", "function_call", "function_call_output"
LOG_PROBS = "message.output_text.logprobs"
# Fields that a chat has under the same name.
SAME = (
    *("model", "stream", "temperature", "top_p", "top_k", "min_p", "parallel_tool_calls", "user", "metadata"),
    *("safety_identifier", "prompt_cache_key", "service_tier", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "seed", "stop", "structured_outputs", "chat_template_kwargs"),
)
# Fields that are accepted with these values only, which ask for nothing more.
ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
}
# Fields that change nothing in the answer.
IGNORED = ("store", "max_tool_calls")
STORED = ("previous_response_id", "conversation", "prompt")
PARTS = ("input_text", "output_text", "text")
# What the fields of a chat's body are called here.
NAMES = {"max_tokens": "max_output_tokens", "messages": "input", RESPONSE_FORMAT: "text.format"}


@dataclass(frozen=True)
class ResponseRequest:
    """A request that has been read.

    chat: what it is for the Triton model
    repeated: the fields of the body that a response repeats
    """

    chat: OpenAIRequest
    repeated: dict[str, Any]


def read_response(body: Mapping[str, Any], tool_form: ToolForm | None = None) -> ResponseRequest:
    """Read the body of ``/v1/responses``. Raises RequestError that names the field.

    tool_form: how the model writes calls of tools; None if that is not known
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in STORED:
        if name in given:
            problem = "is not supported, because nothing is stored: send the earlier items in input"
            raise RequestError(f"{problem}, got {shown(given[name])}", field=name)
    chat = {name: given.pop(name) for name in SAME if name in given}
    chat["messages"], places = _messages(given.pop("instructions", None), given.pop("input", None))
    tools, choice, text = (given.pop(name, None) for name in (TOOLS, TOOL_CHOICE, "text"))
    chat[TOOLS] = None if tools is None else _tools(tools)
    chat[TOOL_CHOICE] = {**choice, "function": choice} if isinstance(choice, dict) else choice
    chat[RESPONSE_FORMAT] = _format(text)
    chat["max_tokens"] = given.pop("max_output_tokens", None)
    chat["logprobs"], chat["top_logprobs"] = _log_probs(
        given.pop("include", None), given.pop("top_logprobs", None)
    )
    for name, value in given.items():
        if isinstance(value, dict):
            # Null is absent inside a field too.
            value = {key: each for key, each in value.items() if each is not None}
        if name in IGNORED or value in ONLY.get(name, ()):
            continue
        raise RequestError(f"is not supported by this server, got {shown(value)}", field=name[:80])
    try:
        asked = read_chat(chat, tool_form)
    except RequestError as error:
        raise RequestError(error.problem, field=response_field(error.field, places)) from error
    repeated = {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "temperature": body["temperature"] if body.get("temperature") is not None else 1.0,
        "text": text or {"format": {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": [{"strict": True, "parameters": None, **tool} for tool in tools or []],
        "top_logprobs": asked.num_top,
        "top_p": body["top_p"] if body.get("top_p") is not None else 1.0,
        "truncation": "disabled",
        "user": body.get("user"),
    }
    return ResponseRequest(asked, repeated)


def response_field(name: str | None, places: Mapping[str, str] | None = None) -> str | None:
    """The name of a chat's field in this interface.

    places: the items that the chat's messages and calls come from
    """
    if name is None:
        return None
    found = re.match(r"(messages\[\d+\](?:\.tool_calls\[\d+\])?)(?:\.function)?", name)
    if found and places:
        return places[found[1]] + name[found.end() :].replace("tool_call_id", "call_id")
    found = re.match(r"\w+", name)
    if found and found[0] in NAMES:
        return NAMES[found[0]] + name[found.end() :].removeprefix(".json_schema")
    return name.replace("].function.", "].") if name.startswith(TOOLS) else name


def _messages(instructions: Any, items: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a chat, and for each, and each of their calls, the item it comes from.

    A text of the assistant and the calls after it are one message, as in a chat.
    """
    found: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    if instructions is not None:
        if not isinstance(instructions, str):
            raise RequestError(f"must be text, got {shown(instructions)}", field="instructions")
        found.append({"role": "system", "content": instructions})
        places["messages[0]"] = "instructions"
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError(
            f"must be text or a list with at least one item, got {shown(items)}", field="input"
        )
    for index, item in enumerate(items):
        place = f"input[{index}]"
        kind = item.get("type") or MESSAGE if isinstance(item, dict) else None
        if kind == "reasoning":  # of another model's answer
            continue
        if kind == CALL:
            if not found or found[-1]["role"] != "assistant":
                places[f"messages[{len(found)}]"] = place
                found.append({"role": "assistant", "content": None})
            calls = found[-1].setdefault("tool_calls", [])
            places[f"messages[{len(found) - 1}].tool_calls[{len(calls)}]"] = place
            calls.append(_call(item))
            continue
        if kind == MESSAGE:
            message = {"role": item.get("role"), "content": _content(f"{place}.content", item.get("content"))}
        elif kind == OUTPUT:
            output = _content(f"{place}.output", item.get("output"))
            message = {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
        else:
            expected = f"a message or an item of the type {CALL} or {OUTPUT}"
            raise RequestError(f"must be {expected}, got {shown(item)}", field=place)
        places[f"messages[{len(found)}]"] = place
        found.append(message)
    return found, places


def _content(where: str, content: Any) -> Any:
    """A text, or parts of one, as a chat has them. Raises RequestError for parts of another kind."""
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in PARTS:
            problem = f'must be a text such as {{"type": "input_text", "text": "Hi"}}, got {shown(part)}'
            raise RequestError(problem, field=f"{where}[{index}]")
    return [{"type": "text", "text": part.get("text")} for part in content]


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _tools(tools: Any) -> Any:
    """Tools as a chat has them, with the function in a field of its own."""
    if not isinstance(tools, list):
        return tools
    names = ("name", "description", "parameters", "strict")
    found = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(
                f"must be an object of the type function, got {shown(tool)}", field=f"{TOOLS}[{index}]"
            )
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _format(text: Any) -> Any:
    """The field ``response_format`` of a chat."""
    if text is None:
        return None
    names = {"format", "verbosity"}
    if not isinstance(text, dict) or text.keys() - names or text.get("verbosity") not in (None, "medium"):
        raise RequestError(
            f'must be an object such as {{"format": {{"type": "text"}}}}, got {shown(text)}', field="text"
        )
    given = text.get("format")
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def _log_probs(include: Any, num_top: Any) -> tuple[bool, Any]:
    """The fields ``logprobs`` and ``top_logprobs`` of a chat."""
    include = [] if include is None else include
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        raise RequestError(f"must be a list of texts, got {shown(include)}", field="include")
    # What is encrypted would be of reasoning, of which there is none.
    others = [name for name in include if name not in (LOG_PROBS, "reasoning.encrypted_content")]
    if others:
        raise RequestError(f"must have {LOG_PROBS} only, got {shown(others)}", field="include")
    return LOG_PROBS in include or bool(num_top), num_top
