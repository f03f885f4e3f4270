"""Responses of a Triton model to answers of OpenAI's interface: whole, or as events."""

import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_repo.openai.bodies import OpenAIRequest
from triton_repo.openai.tool_calls import Part, ToolParser
from triton_repo.triton.tensors import LEAST_LOG_PROB


@dataclass(frozen=True)
class Form:
    """The names in the answers of an interface.

    prefix: of an answer's identifier
    has_end_mark: whether ``[DONE]`` comes after the last event
    """

    prefix: str
    whole: str
    event: str
    has_end_mark: bool = True


CHAT = Form("chatcmpl-", "chat.completion", "chat.completion.chunk")
COMPLETION = Form("cmpl-", "text_completion", "text_completion")


@dataclass
class Choice:
    """One text so far."""

    text: str = ""
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    # Draft tokens that were verified, and those that became output.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    # What is new of the text and of calls of tools; and all calls together, as the client gets them.
    parts: list[Part] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    # If the request asked for them: the tokens' texts, their log-probabilities, which the first token of a
    # prompt lacks, and the most probable tokens in the place of each with theirs.
    tokens: list[str] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    top: list[list[tuple[str, float]]] = field(default_factory=list)


@dataclass
class Answer:
    """The answer to one request: whole at the end, or as events.

    created: seconds since 1970
    """

    form: Form
    created: int
    model: str
    request: OpenAIRequest
    identifier: str = field(init=False)
    choices: list[Choice] = field(init=False)
    parsers: list[ToolParser | None] = field(init=False)

    def __post_init__(self) -> None:
        self.identifier = f"{self.form.prefix}{uuid.uuid4().hex}"
        self.choices = [Choice() for _ in self.request.inputs]
        self.parsers = [self.request.parser() for _ in self.request.inputs]

    def add(self, index: int, tensors: Mapping[str, Any]) -> Choice:
        """Take a Triton response; returns what is new in it."""
        new = Choice(
            text=tensors["text_output"][0].decode(),
            finish_reason=tensors["finish_reason"][0].decode() or None,
            num_input_tokens=int(tensors["num_input_tokens"][0]),
            num_cached_tokens=int(tensors["num_cached_tokens"][0]),
            num_output_tokens=int(tensors["num_output_tokens"][0]),
            num_drafted_tokens=int(tensors["num_drafted_tokens"][0]),
            num_accepted_tokens=int(tensors["num_accepted_tokens"][0]),
        )
        if self.request.num_top:
            _add_scores(new, tensors["token_scores"])
        elif self.request.log_probs:
            new.tokens = [token.decode() for token in tensors["output_tokens"]]
            new.log_probs = [max(float(value), LEAST_LOG_PROB) for value in tensors["output_log_probs"]]
            new.top = [[] for _ in new.tokens]
        if self.request.echo:
            self._put_prompt_before(new, tensors["prompt_scores"])
        choice = self.choices[index]
        self._read_calls(index, new)
        choice.text += new.text
        choice.finish_reason = new.finish_reason
        choice.num_input_tokens, choice.num_output_tokens = new.num_input_tokens, new.num_output_tokens
        choice.num_cached_tokens = new.num_cached_tokens
        choice.num_drafted_tokens, choice.num_accepted_tokens = (
            new.num_drafted_tokens,
            new.num_accepted_tokens,
        )
        choice.tokens += new.tokens
        choice.log_probs += new.log_probs
        choice.top += new.top
        return new

    def _read_calls(self, index: int, new: Choice) -> None:
        """Take the calls of tools out of what is new."""
        parser = self.parsers[index]
        if parser is None:
            return
        new.parts = parser.feed(new.text)
        if new.finish_reason is not None:
            new.parts += parser.end()
            if new.finish_reason == "stop" and parser.num_calls:
                new.finish_reason = "tool_calls"
        new.text = "".join(part.text for part in new.parts if part.index is None)
        calls = self.choices[index].calls
        for part in new.parts:
            if part.name is not None:
                function = {"name": part.name, "arguments": ""}
                calls.append({"id": part.identifier, "type": "function", "function": function})
            elif part.index is not None:
                calls[part.index]["function"]["arguments"] += part.text

    def _put_prompt_before(self, new: Choice, scores: Any) -> None:
        prompt = Choice()
        _add_scores(prompt, scores)
        new.text = "".join(prompt.tokens) + new.text
        if self.request.log_probs:
            new.tokens = prompt.tokens + new.tokens
            new.log_probs = prompt.log_probs + new.log_probs
            new.top = prompt.top + new.top

    def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for index, choice in enumerate(self.choices):
            text: dict[str, Any] = {"text": choice.text}
            if self.form == CHAT:
                content = choice.text or (None if choice.calls else "")
                calls = {"tool_calls": choice.calls} if choice.calls else {}
                text = {"message": {"role": "assistant", "content": content, "refusal": None, **calls}}
            choices.append(self._choice(index, text, choice, 0))
        return {**self._object(self.form.whole, choices), "usage": self.usage()}

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first text: in a chat, whose turn it is."""
        if self.form == CHAT:
            for index in range(len(self.choices)):
                yield self._event(index, {"delta": {"role": "assistant", "content": ""}}, Choice(), 0)

    def events(self, index: int, tensors: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a Triton response: one, or none for a step that completed no character."""
        offset = len(self.choices[index].text)
        new = self.add(index, tensors)
        calls = [_call_delta(part) for part in new.parts if part.index is not None]
        if new.text or new.tokens or new.finish_reason or calls:
            delta: dict[str, Any] = {"content": new.text} if new.text else {}
            delta |= {"tool_calls": calls} if calls else {}
            text = {"delta": delta} if self.form == CHAT else {"text": new.text}
            yield self._event(index, text, new, offset)

    def end(self) -> Iterator[dict[str, Any]]:
        """The events after the last text: the usage, if it was asked for."""
        if self.request.include_usage:
            yield {**self._object(self.form.event, []), "usage": self.usage()}

    def error(self, problem: dict[str, Any]) -> dict[str, Any]:
        """The event of an error after the first events. problem: the error as a whole answer has it"""
        return problem

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
                {**scored(token, value), "top_logprobs": [scored(*each) for each in top]}
                for token, value, top in zip(part.tokens, part.log_probs, part.top, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for token in part.tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": part.tokens,
            "token_logprobs": part.log_probs,
            "top_logprobs": self._top(part) if self.request.num_top else None,
            "text_offset": offsets,
        }

    @staticmethod
    def _top(part: Choice) -> list[dict[str, float] | None]:
        """For every token itself and the most probable ones, by their texts; None for a prompt's first."""
        found: list[dict[str, float] | None] = []
        for token, value, top in zip(part.tokens, part.log_probs, part.top, strict=True):
            if value is None:
                found.append(None)
            else:
                # Of different tokens with one text, the most probable stands.
                found.append({token: value, **dict(reversed(top))})
        return found

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, whatever the number of its choices. Rejected drafts are no tokens of it."""
        first_choices = self.choices[:: self.request.num_choices]
        prompt = sum(choice.num_input_tokens for choice in first_choices)
        cached = sum(choice.num_cached_tokens for choice in first_choices)
        completion = sum(choice.num_output_tokens for choice in self.choices)
        drafted = sum(choice.num_drafted_tokens for choice in self.choices)
        accepted = sum(choice.num_accepted_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _call_delta(part: Part) -> dict[str, Any]:
    """What is new of a call, as events have it."""
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": ""}
    return {"index": part.index, "id": part.identifier, "type": "function", "function": function}


def _add_scores(choice: Choice, scores: Any) -> None:
    """Add the tokens of the tensor ``token_scores`` or ``prompt_scores``."""
    for text, log_prob, top in json.loads(scores[0]):
        choice.tokens.append(text)
        choice.log_probs.append(log_prob)
        choice.top.append([(token, value) for token, value in top])


def scored(token: str, log_prob: float | None) -> dict[str, Any]:
    return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}
