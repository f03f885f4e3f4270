"""OpenAI's Responses interface: its requests to those of a chat, and the answers to them, whole or as events.

Nothing is stored, so a client sends the earlier items of a conversation with every request.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.core.errors import RequestError
from triton_repo.openai.answers import Answer, Choice, Form, scores_of
from triton_repo.openai.bodies import OpenAIRequest, read_chat
from triton_repo.openai.tool_calls import ToolForm
from triton_repo.openai.tools import RESPONSE_FORMAT, TOOL_CHOICE, TOOLS
from triton_repo.web.json_body import TEXT, Kind, shown

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


def read_response(
    body: Mapping[str, Any], tool_form: ToolForm | None = None
) -> tuple[OpenAIRequest, dict[str, Any]]:
    """Read the body of ``/v1/responses``: as a chat, and the fields that the answer repeats.

    Raises RequestError that names the field.

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
    return asked, repeated


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
        found.append({"role": "system", "content": TEXT.read("instructions", instructions)})
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
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function":
            function = {name: tool[name] for name in names if tool.get(name) is not None}
            tool = {"type": "function", "function": function}
        found.append(tool)  # what is no function is refused as in a chat
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
    include = Kind(list[str] | None, "a list of texts").read("include", include) or []
    # What is encrypted would be of reasoning, of which there is none.
    others = [name for name in include if name not in (LOG_PROBS, "reasoning.encrypted_content")]
    if others:
        raise RequestError(f"must have {LOG_PROBS} only, got {shown(others)}", field="include")
    return LOG_PROBS in include or bool(num_top), num_top


RESPONSE = Form("resp_", "response", "response", has_end_mark=False)


@dataclass
class ResponseAnswer(Answer):
    """The answer to a request of the Responses interface.

    repeated: the fields of the body that it repeats
    Log-probabilities are left out where tools are given.
    """

    repeated: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Of the output, as responses show them. The last one may be open, and events are about it.
        self._items: list[dict[str, Any]] = []
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        if choice.text or not choice.calls:
            self._items.append(self._message(choice))
        for call in choice.calls:
            function = call["function"]
            self._items.append(self._call_item(call["id"], function["name"], function["arguments"]))
        return self._response(choice)

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._numbered(kind, response=self._response(Choice()))

    def events(self, index: int, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        new = self.add(index, tensors)
        if self.parsers[index] is None:
            yield from self._text(new)
        for part in new.parts:
            if part.index is None:
                yield from self._text(Choice(part.text))
            elif part.name is not None:
                yield from self._end_item()
                item = self._call_item(str(part.identifier), part.name, "", "in_progress")
                yield self._begin_item(item, dict(item))
            elif part.text:
                self._items[-1]["arguments"] += part.text
                yield self._of_item("function_call_arguments.delta", delta=part.text)

    def end(self) -> Iterator[dict[str, Any]]:
        (choice,) = self.choices
        if not self._items:
            yield from self._open_message()
        yield from self._end_item()
        response = self._response(choice)
        yield self._numbered(response["status"], response=response)

    def error(self, problem: dict[str, Any]) -> dict[str, Any]:
        found = problem["error"]
        event = self._numbered("error", code=found["type"], message=found["message"], param=found["param"])
        return {**event, "type": "error"}

    def _text(self, new: Choice) -> Iterator[dict[str, Any]]:
        """What a part of the text adds to the message that is open, or to a new one."""
        if not (new.text or new.scores):
            return
        yield from self._open_message()
        (content,) = self._items[-1]["content"]
        log_probs = self._scores(new)
        content["text"] += new.text
        content["logprobs"] += log_probs
        yield self._of_item("output_text.delta", content_index=0, delta=new.text, logprobs=log_probs)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        """The events with which a message begins, unless one is open."""
        last = self._items[-1] if self._items else {}
        if last.get("type") == MESSAGE and last["status"] == "in_progress":
            return
        yield from self._end_item()
        item = {**self._message(Choice()), "status": "in_progress"}
        yield self._begin_item(item, {**item, "content": []})
        part = {**item["content"][0], "logprobs": []}
        yield self._of_item("content_part.added", content_index=0, part=part)

    def _begin_item(self, item: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
        """Add an item; returns its event. shown: the item as it is now"""
        self._items.append(item)
        return self._numbered("output_item.added", output_index=len(self._items) - 1, item=shown)

    def _end_item(self) -> Iterator[dict[str, Any]]:
        """The events that end the item that is open."""
        item = self._items[-1] if self._items else None
        if item is None or item["status"] != "in_progress":
            return
        item["status"] = self._status
        if item["type"] == MESSAGE:
            (content,) = item["content"]
            ended = {"text": content["text"], "logprobs": content["logprobs"]}
            yield self._of_item("output_text.done", content_index=0, **ended)
            yield self._of_item("content_part.done", content_index=0, part=content)
        else:
            ended = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("function_call_arguments.done", **ended)
        yield self._numbered("output_item.done", output_index=len(self._items) - 1, item=item)

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _message(self, choice: Choice) -> dict[str, Any]:
        content = {
            "type": "output_text",
            "text": choice.text,
            "annotations": [],
            "logprobs": self._scores(choice),
        }
        identifier = f"msg_{uuid.uuid4().hex}"
        return {
            "type": MESSAGE,
            "id": identifier,
            "status": self._status,
            "role": "assistant",
            "content": [content],
        }

    def _call_item(
        self, identifier: str, name: str, arguments: str, status: str | None = None
    ) -> dict[str, Any]:
        return {
            "type": CALL,
            "id": f"fc_{uuid.uuid4().hex}",
            "call_id": identifier,
            "name": name,
            "arguments": arguments,
            "status": status or self._status,
        }

    def _scores(self, choice: Choice) -> list[dict[str, Any]]:
        return scores_of(choice) if self.parsers[0] is None else []

    def _response(self, choice: Choice) -> dict[str, Any]:
        """The response as far as it has come."""
        has_ended = choice.finish_reason is not None
        status = self._status if has_ended else "in_progress"
        return {
            "id": self.identifier,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(self._items),
            "previous_response_id": None,
            "store": False,
            **self.repeated,
            "usage": self._response_usage() if has_ended else None,
        }

    def _response_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **usage["completion_tokens_details"]},
            "total_tokens": usage["total_tokens"],
        }

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item."""
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._numbered(kind, **where, **fields)

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}
