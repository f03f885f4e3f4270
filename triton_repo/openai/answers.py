"""Responses of a Triton model to answers of OpenAI's interface: whole, or as events."""

import itertools
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


# Counts of tokens that a Triton response has. Drafted ones were verified, and accepted ones became output.
COUNTS = (
    *("num_input_tokens", "num_cached_tokens", "num_output_tokens"),
    *("num_drafted_tokens", "num_accepted_tokens"),
)


class Score(NamedTuple):
    """A token's text, its log-probability, and the most probable tokens in its place with theirs.

    The first token of a prompt has no log-probability.
    """

    token: str
    log_prob: float | None
    top: list[tuple[str, float]]


@dataclass
class Choice:
    """One text so far.

    parts: what is new of the text and of calls of tools
    calls: all calls together, as the client gets them
    scores: of the tokens, if the request asked for them
    """

    text: str = ""
    finish_reason: str | None = None
    counts: Counter[str] = field(default_factory=Counter)
    parts: list[Part] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)


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
            counts=Counter({name: int(tensors[name][0]) for name in COUNTS}),
        )
        if self.request.num_top:
            new.scores = _read_scores(tensors["token_scores"])
        elif self.request.log_probs:
            pairs = zip(tensors["output_tokens"], tensors["output_log_probs"], strict=True)
            new.scores = [
                Score(token.decode(), max(float(value), LEAST_LOG_PROB), []) for token, value in pairs
            ]
        if self.request.echo:
            prompt = _read_scores(tensors["prompt_scores"])
            new.text = "".join(score.token for score in prompt) + new.text
            new.scores = prompt + new.scores if self.request.log_probs else []
        self._read_calls(index, new)
        choice = self.choices[index]
        choice.text += new.text
        choice.finish_reason, choice.counts = new.finish_reason, new.counts
        choice.scores += new.scores
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
        if new.text or new.scores or new.finish_reason or calls:
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
        log_probs = self._log_probs(part, offset) if part.scores else None
        return {"index": index, **text, "logprobs": log_probs, "finish_reason": part.finish_reason}

    def _log_probs(self, part: Choice, offset: int) -> dict[str, Any]:
        if self.form == CHAT:
            return {"content": scores_of(part), "refusal": None}
        tokens = [score.token for score in part.scores]
        offsets = itertools.accumulate(map(len, tokens[:-1]), initial=offset)
        return {
            "tokens": tokens,
            "token_logprobs": [score.log_prob for score in part.scores],
            "top_logprobs": [_top(score) for score in part.scores] if self.request.num_top else None,
            "text_offset": list(offsets),
        }

    def usage(self) -> dict[str, Any]:
        """A prompt counts once, whatever the number of its choices. Rejected drafts are no tokens of it."""

        def total(name: str, choices: list[Choice]) -> int:
            return sum(choice.counts[name] for choice in choices)

        first_choices = self.choices[:: self.request.num_choices]
        prompt = total("num_input_tokens", first_choices)
        completion = total("num_output_tokens", self.choices)
        accepted = total("num_accepted_tokens", self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": total("num_cached_tokens", first_choices)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": total("num_drafted_tokens", self.choices) - accepted,
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


def _read_scores(tensor: Any) -> list[Score]:
    """The tokens of ``token_scores`` or ``prompt_scores``."""
    return [Score(token, value, [tuple(each) for each in top]) for token, value, top in json.loads(tensor[0])]


def _top(score: Score) -> dict[str, float] | None:
    """The token itself and the most probable ones, by their texts; None for a prompt's first."""
    if score.log_prob is None:
        return None
    # Of different tokens with one text, the most probable stands.
    return {score.token: score.log_prob, **dict(reversed(score.top))}


def scores_of(part: Choice) -> list[dict[str, Any]]:
    """The tokens of a chat, each with the most probable ones in its place."""

    def scored(token: str, log_prob: float | None) -> dict[str, Any]:
        return {"token": token, "logprob": log_prob, "bytes": list(token.encode())}

    return [
        {**scored(score.token, score.log_prob), "top_logprobs": [scored(*each) for each in score.top]}
        for score in part.scores
    ]
