"""Prompts as token ids: a model's tokenizer and chat template applied to the turns of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from training.conversations import TEXT_PROMPT_SHARE, Message, PlainText, Turn, plain_messages, read_turns
from training.rows import BadRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Example:
    """A prompt, and the data's own continuation of it, if it has one."""

    prompt_ids: list[int]
    answer_ids: list[int] | None


def read_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """All prompts of a data file as token ids. Raises TrainingError naming file, line and field."""
    return make_examples(read_turns(path), tokenizer, BadRows())


def make_examples(
    turns: Iterable[Turn | PlainText], tokenizer: PreTrainedTokenizerBase, bad: BadRows
) -> list[Example]:
    """The turns as token ids; empty prompts are left out.

    Raises TrainingError for a turn that the chat template refuses, unless ``bad`` skips it.
    """
    examples = []
    for turn in turns:
        try:
            example = _example(turn, tokenizer)
        except (ValueError, TemplateError) as error:
            bad.refuse(f"{turn.where}: {error}; got {_beginning(turn)}")
            continue
        if example.prompt_ids:
            examples.append(example)
    return examples


def _beginning(turn: Turn | PlainText) -> str:
    return repr((turn.messages[-1]["content"] if isinstance(turn, Turn) else turn.text)[:60])


def _example(turn: Turn | PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    """A turn as token ids; without prompt ids where it holds no prompt."""
    if isinstance(turn, PlainText):
        return _text_example(turn, tokenizer)
    prompt = encode_messages(turn.messages, tokenizer, add_generation_prompt=True)
    if turn.answer is None:
        return Example(prompt, None)
    messages = [*turn.messages, {"role": "assistant", "content": turn.answer}]
    # After an answer that was cut off, the end of text that a template writes would be wrong.
    whole = encode_messages(messages, tokenizer, continue_final_message=not turn.finished)
    # A template may rewrite earlier turns; its text cannot be cut at the prompt then.
    return Example(prompt, whole[len(prompt) :] if whole[: len(prompt)] == prompt else None)


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Text as it is, with what the tokenizer puts before every text."""
    return list(tokenizer(text)["input_ids"])


def _text_example(text: PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    ids = encode_text(text.text, tokenizer)
    if text.prompt_length is None:
        cut = max(1, int(len(ids) * TEXT_PROMPT_SHARE))
        return Example(ids[:cut], ids[cut:]) if len(ids) > 1 else Example([], None)
    prompt = encode_text(text.text[: text.prompt_length], tokenizer)
    if text.prompt_length == len(text.text) or ids[: len(prompt)] != prompt:
        return Example(prompt, None)
    end = [tokenizer.eos_token_id] if text.finished and tokenizer.eos_token_id is not None else []
    return Example(prompt, ids[len(prompt) :] + end)


def encode_messages(messages: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """A conversation in the model's own template, or as plain text for a model without one."""
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return encode_text(plain_messages(messages), tokenizer)
