"""The token sequences of a run: prompts in the model's template, and their continuations.

Training is self-distillation: the target model's own greedy continuations are the labels. A draft is accepted
when the target model would write the same, so its own text makes the best labels. Every batch that the model
writes is kept in a file as soon as it is there, so an interrupted run continues. The name of the file has a
hash of everything that the text depends on.
"""

import hashlib
import json
import re
import time
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from runtime.core.jsonl_store import JsonlStore
from training.data.conversations import (
    PLACEHOLDER,
    TEXT_PROMPT_SHARE,
    BadRows,
    Message,
    PlainText,
    Turn,
    brief,
    chat_text,
    encode_rendered,
    plain_messages,
)
from training.target_model import continue_prompts

# A prompt that opens the model's thoughts, such as DeepSeek-R1's, ends with this, such as <think>.
OPEN_TAG = re.compile(r"(<[\w:]+>|\[[\w:]+\])\s*\Z")

Beside = TypeVar("Beside")


@dataclass(frozen=True)
class Example:
    """A prompt, and the continuation that the data has for it.

    answer_ids: None if the data has none, and empty for one that does not follow the prompt
    """

    prompt_ids: list[int]
    answer_ids: list[int] | None


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
        except (ValueError, TypeError, TemplateError) as error:
            text = turn.messages[-1]["content"] if isinstance(turn, Turn) else turn.text
            bad.refuse(f"{turn.where}: {error}; got {brief(text)}")
            continue
        if example.prompt_ids:
            examples.append(example)
    return examples


def _example(turn: Turn | PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    """A turn as token ids. ``prompt_ids`` is empty if the turn holds no prompt."""
    if isinstance(turn, PlainText):
        return _text_example(turn, tokenizer)
    prompt = encode_messages(turn.messages, tokenizer, add_generation_prompt=True)
    if turn.answer is None:
        return Example(prompt, None)
    return Example(prompt, _answer_ids(turn, turn.answer, prompt, tokenizer))


def _answer_ids(
    turn: Turn, answer: str, prompt_ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The answer behind its prompt; one that was cut off has no end of text, which templates write.

    Templates write an answer as one of the past. Those of models that think move or drop the thoughts, and
    before thoughts that were cut off they write empty ones. Then the answer follows the prompt as the data
    has it. So does a verbatim one. Empty, if the prompt opens thoughts and the finished answer holds none, or
    if the answer cannot follow the prompt.
    """

    def rendered(content: str) -> str:
        return chat_text([*turn.messages, {"role": "assistant", "content": content}], tokenizer)

    if not getattr(tokenizer, "chat_template", None):
        messages = [*turn.messages, {"role": "assistant", "content": answer}]
        whole = encode_messages(messages, tokenizer) + _end(tokenizer, finished=turn.finished)
        return whole[len(prompt_ids) :] if whole[: len(prompt_ids)] == prompt_ids else []
    prompt = chat_text(turn.messages, tokenizer, add_generation_prompt=True)
    text = rendered(answer) if turn.finished else rendered(answer + PLACEHOLDER).partition(PLACEHOLDER)[0]
    if turn.verbatim or not _follows(prompt, answer, text):
        _, found, end = rendered(PLACEHOLDER).rpartition(PLACEHOLDER)
        end = end if found and turn.finished else ""
        opened = OPEN_TAG.search(prompt)
        if opened and not turn.verbatim:
            tag = opened[1]
            if turn.finished and f"{tag[0]}/{tag[1:]}" not in answer + end:
                return []
            if answer.lstrip().startswith(tag):
                answer = answer.lstrip().removeprefix(tag).lstrip()
        text = prompt + answer + end
    whole = encode_rendered(text, tokenizer)
    if whole[: len(prompt_ids)] == prompt_ids:
        return whole[len(prompt_ids) :]
    # The prompt's end and the answer's beginning are one token together, which the model never reads.
    return encode_rendered(text.removeprefix(prompt), tokenizer) if text.startswith(prompt) else []


def _follows(prompt: str, answer: str, text: str) -> bool:
    """Whether ``text`` is the prompt and the answer, with other white space and an end at most.

    Empty thoughts may stand before the answer, unless the prompt or the answer begins with thoughts.
    """
    if not text.startswith(prompt):
        return False
    written = text.removeprefix(prompt).split()
    plain = "".join(answer.split())
    has_thoughts = OPEN_TAG.search(prompt) or plain.startswith(tuple(written[:1]))
    place = "".join(written).find(plain)
    return place == 0 if has_thoughts else place >= 0


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Text without a template, with the special tokens that the tokenizer puts before every text."""
    return list(tokenizer(text)["input_ids"])


def _end(tokenizer: PreTrainedTokenizerBase, *, finished: bool) -> list[int]:
    """What follows a text without a template: the end of text, if its author ended it."""
    return [tokenizer.eos_token_id] if finished and tokenizer.eos_token_id is not None else []


def _text_example(text: PlainText, tokenizer: PreTrainedTokenizerBase) -> Example:
    ids = encode_text(text.text, tokenizer)
    if text.prompt_length is None:
        cut = max(1, int(len(ids) * TEXT_PROMPT_SHARE))
        return Example(ids[:cut], ids[cut:]) if len(ids) > 1 else Example([], None)
    prompt = encode_text(text.text[: text.prompt_length], tokenizer)
    if text.prompt_length == len(text.text) or ids[: len(prompt)] != prompt:
        return Example(prompt, None)
    return Example(prompt, ids[len(prompt) :] + _end(tokenizer, finished=text.finished))


def encode_messages(messages: list[Message], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    """A conversation in the model's own chat template, or as plain text for a model without a template."""
    if getattr(tokenizer, "chat_template", None):
        return encode_rendered(chat_text(messages, tokenizer, **options), tokenizer)
    return encode_text(plain_messages(messages), tokenizer)


class Sequences:
    """Token sequences of varying length. Each is a prompt with its continuation.

    tokens [total] int32: all sequences, one after the other
    offsets [n + 1] int64: where each sequence begins in ``tokens``, and where the last one ends
    prompt_lengths [n] int64
    """

    def __init__(self, rows: list[tuple[list[int], list[int]]]):
        lengths = [len(prompt) + len(answer) for prompt, answer in rows]
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        flat = [token for prompt, answer in rows for token in (*prompt, *answer)]
        self.tokens: NDArray[np.int32] = np.array(flat, np.int32)
        self.prompt_lengths: NDArray[np.int64] = np.array([len(prompt) for prompt, _ in rows], np.int64)

    def __len__(self) -> int:
        return self.prompt_lengths.size

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def token_counts(self, indices: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
        """How often the continuations of the sequences ``indices`` have each token, [vocab_size]."""
        parts = [self[index][self.prompt_lengths[index] :] for index in indices]
        return np.bincount(np.concatenate(parts), minlength=vocab_size)


def continue_in_batches(
    model: Any, prompts: list[tuple[list[int], Beside]], *, total: int, batch_size: int, **limits: Any
) -> Generator[tuple[list[tuple[list[int], Beside]], list[list[int]]], None, None]:
    """Yield batches of prompts, each with what is beside it, and their continuations, and show the progress.

    total: the number of prompts with those that were continued before
    limits: as of ``continue_prompts``
    """
    # Prompts of similar length share a batch, so little is wasted on padding.
    prompts = sorted(prompts, key=lambda prompt: len(prompt[0]))
    # Prompts end many at once, so the time left is estimated from the mean over all batches. The bar is
    # refreshed even if no prompt has ended (``miniters``).
    options: dict[str, Any] = {"desc": "distilling", "unit": "prompt", "smoothing": 0, "miniters": 0}
    with tqdm(total=total, initial=total - len(prompts), **options) as bar:
        for start in range(0, len(prompts), batch_size):
            batch, show = prompts[start : start + batch_size], partial(_show, bar, bar.n)
            continuations = continue_prompts(model, [ids for ids, _ in batch], progress=show, **limits)
            yield batch, continuations
            # By now they have been kept.
            show(sum(map(len, continuations)), len(batch))


def _show(bar: Any, begun: int, num_tokens: int, num_ended: int) -> None:
    """Show a batch that began after ``begun`` prompts. A prompt without an end counts when all are done."""
    bar.set_postfix_str(f"{num_tokens:,} tokens of this batch", False)
    bar.update(begun + num_ended - bar.n)


def distill(
    model: Any,
    examples: list[Example],
    *,
    model_fingerprint: str,
    cache_dir: Path,
    max_new_tokens: int,
    batch_size: int,
    eos_token_ids: list[int],
) -> Sequences:
    """Greedy continuations of all prompts. Those that the cache has are read from it."""
    key = hashlib.sha256(model_fingerprint.encode())
    key.update(json.dumps([[e.prompt_ids for e in examples], max_new_tokens, eos_token_ids]).encode())
    answers: dict[int, list[int]] = {}
    store = JsonlStore(
        cache_dir / f"distilled-{key.hexdigest()[:16]}.jsonl",
        {"key": key.hexdigest()},
        lambda batch: answers.update(zip(batch["prompts"], batch["answers"], strict=True)),
        flag="--cache-dir",
    )
    left = [(e.prompt_ids, index) for index, e in enumerate(examples) if index not in answers]
    began, num_tokens = time.perf_counter(), 0
    limits = {"max_new_tokens": max_new_tokens, "end_token_ids": eos_token_ids}
    batches = continue_in_batches(model, left, total=len(examples), batch_size=batch_size, **limits)
    with closing(batches):
        for batch, continuations in batches:
            indices = [index for _, index in batch]
            store.append({"prompts": indices, "answers": continuations})
            answers.update(zip(indices, continuations, strict=True))
            num_tokens += sum(map(len, continuations))
    if left:
        seconds = time.perf_counter() - began
        print(
            f"train: the target model continued {len(left):,} prompts by {num_tokens:,} tokens in "
            f"{seconds:,.1f} s, {num_tokens / seconds:,.1f} tokens/s",
            flush=True,
        )
    return Sequences([(e.prompt_ids, answers[i]) for i, e in enumerate(examples)])
