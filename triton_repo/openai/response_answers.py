"""A chat's answer as one of OpenAI's Responses interface: whole, or as events."""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_repo.openai.answers import Answer, Choice, Form, scored
from triton_repo.openai.response_bodies import CALL, MESSAGE

RESPONSE = Form("resp_", "response", "response", has_end_mark=False)


@dataclass
class _Item:
    """An item of the output. number: its place; value: as responses show it"""

    number: int
    value: dict[str, Any]

    @property
    def where(self) -> dict[str, Any]:
        return {"item_id": self.value["id"], "output_index": self.number}


@dataclass
class ResponseAnswer(Answer):
    """The answer to a request of the Responses interface.

    repeated: as of ``ResponseRequest``
    Log-probabilities are left out where tools are given.
    """

    repeated: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._items: list[_Item] = []
        self._calls: dict[int, _Item] = {}
        self._num_events = 0

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        if choice.text or not choice.calls:
            self._add(self._message(choice))
        for call in choice.calls:
            function = call["function"]
            self._add(self._call_item(call["id"], function["name"], function["arguments"]))
        return self._response(choice)

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("created", "in_progress"):
            yield self._numbered(f"response.{kind}", response=self._response(Choice()))

    def events(self, index: int, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        new = self.add(index, tensors)
        if self.parsers[index] is None:
            yield from self._text(new)
        for part in new.parts:
            if part.index is None:
                yield from self._text(Choice(part.text))
            elif part.name is not None:
                yield from self._end_items()
                item = self._add(self._call_item(str(part.identifier), part.name, "", "in_progress"))
                self._calls[part.index] = item
                yield self._numbered(
                    "response.output_item.added", output_index=item.number, item=dict(item.value)
                )
            elif part.text:
                item = self._calls[part.index]
                item.value["arguments"] += part.text
                yield self._numbered("response.function_call_arguments.delta", **item.where, delta=part.text)

    def end(self) -> Iterator[dict[str, Any]]:
        (choice,) = self.choices
        if not self._items:
            yield from self._open_message()
        yield from self._end_items()
        response = self._response(choice)
        yield self._numbered(f"response.{response['status']}", response=response)

    def error(self, problem: dict[str, Any]) -> dict[str, Any]:
        found = problem["error"]
        return self._numbered("error", code=found["type"], message=found["message"], param=found["param"])

    def _text(self, new: Choice) -> Iterator[dict[str, Any]]:
        """What a part of the text adds to the message that is open, or to a new one."""
        if not (new.text or new.tokens):
            return
        yield from self._open_message()
        item = self._items[-1]
        (content,) = item.value["content"]
        log_probs = self._scores(new)
        content["text"] += new.text
        content["logprobs"] += log_probs
        delta = {"delta": new.text, "logprobs": log_probs}
        yield self._numbered("response.output_text.delta", **item.where, content_index=0, **delta)

    def _open_message(self) -> Iterator[dict[str, Any]]:
        """The events with which a message begins, unless one is open."""
        last = self._items[-1].value if self._items else {}
        if last.get("type") == MESSAGE and last["status"] == "in_progress":
            return
        yield from self._end_items()
        item = self._add({**self._message(Choice()), "status": "in_progress"})
        empty = {**item.value, "content": []}
        yield self._numbered("response.output_item.added", output_index=item.number, item=empty)
        part = {**item.value["content"][0], "logprobs": []}
        yield self._numbered("response.content_part.added", **item.where, content_index=0, part=part)

    def _end_items(self) -> Iterator[dict[str, Any]]:
        """The events that end the item that is open."""
        item = self._items[-1] if self._items else None
        if item is None or item.value["status"] != "in_progress":
            return
        item.value["status"] = self._status
        if item.value["type"] == MESSAGE:
            (content,) = item.value["content"]
            ended = {"text": content["text"], "logprobs": content["logprobs"]}
            yield self._numbered("response.output_text.done", **item.where, content_index=0, **ended)
            yield self._numbered("response.content_part.done", **item.where, content_index=0, part=content)
        else:
            ended = {"name": item.value["name"], "arguments": item.value["arguments"]}
            yield self._numbered("response.function_call_arguments.done", **item.where, **ended)
        yield self._numbered("response.output_item.done", output_index=item.number, item=item.value)

    @property
    def _status(self) -> str:
        return "incomplete" if self.choices[0].finish_reason == "length" else "completed"

    def _add(self, value: dict[str, Any]) -> _Item:
        self._items.append(_Item(len(self._items), value))
        return self._items[-1]

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
        if self.parsers[0] is not None:
            return []
        return [
            {**scored(token, value), "top_logprobs": [scored(*each) for each in top]}
            for token, value, top in zip(choice.tokens, choice.log_probs, choice.top, strict=True)
        ]

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
            "output": [item.value for item in self._items],
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

    def _numbered(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}
