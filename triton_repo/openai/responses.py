"""Answers of OpenAI's interface, made of the responses of Triton models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from triton_repo.openai.requests import OpenAIRequest

# Stands for a log-probability of minus infinity, which JSON lacks.
LEAST_LOG_PROB = -9999.0


@dataclass(frozen=True)
class Form:
    """How one of the two interfaces calls its answers. prefix: of their identifiers"""

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
    asked: OpenAIRequest
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in self.asked.inputs]

    def add(self, index: int, tensors: Mapping[str, Any]) -> Choice:
        """Take a Triton response; returns what is new in it."""
        new = Choice(
            text=tensors["text_output"][0].decode(),
            finish_reason=tensors["finish_reason"][0].decode() or None,
            num_input_tokens=int(tensors["num_input_tokens"][0]),
            num_output_tokens=int(tensors["num_output_tokens"][0]),
        )
        if self.asked.log_probs:
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
        if self.asked.include_usage:
            yield {**self._object(self.form.event, []), "usage": self._usage()}

    def _event(self, index: int, text: dict[str, Any], new: Choice, offset: int) -> dict[str, Any]:
        usage = {"usage": None} if self.asked.include_usage else {}
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
        prompt = sum(choice.num_input_tokens for choice in self.choices[:: self.asked.num_choices])
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
