"""Prompts and conversations to token ids, with the model's chat template, and token ids to text."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from runtime.core.bundle import TOKENIZER_NAME, Bundle
from runtime.core.errors import BundleError, RequestError
from runtime.core.prompts import ASSISTANT, USER, Prompt, encode_utf8

if TYPE_CHECKING:
    from runtime.chat_template import ChatTemplate

# Bytes that are not a whole character decode to this.
INCOMPLETE = "\ufffd"
# So many tokens of the prompt are decoded with the first token: they decide whether its text begins with a
# space.
CONTEXT = 8
# A character has at most so many bytes, and each of them may be a token.
MAX_CHARACTER_BYTES = 4
# At most so many tokens whose text ends in invalid bytes are decoded again with every next one.
MAX_PENDING = 4 * MAX_CHARACTER_BYTES


class PromptTokenizer:
    """The bundle's tokenizer and the formats of its prompts.

    A special token that a user writes, such as ``<|im_end|>``, stays text, so no user can end their message
    and forge another one. Raw prompts and the assistant's messages may hold special tokens.
    """

    def __init__(self, bundle: Bundle):
        self._path = bundle.path
        model = bundle.manifest.model
        self.tokenizer = self._read()
        size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        if size > model.vocab_size:
            raise BundleError(
                f"{TOKENIZER_NAME} is not this model's: it must have at most {model.vocab_size} tokens, "
                f"got {size}"
            )
        self.prefix, self.suffix = model.prompt_prefix, model.prompt_suffix
        self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        added = self.tokenizer.get_added_tokens_decoder().values()
        special = sorted((token.content for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special))) if special else None

    def _read(self) -> Tokenizer:
        try:
            return Tokenizer.from_file(str(self._path / TOKENIZER_NAME))
        except Exception as error:
            raise BundleError(f"{self._path}: {TOKENIZER_NAME} cannot be read: {error}") from error

    @cached_property
    def template(self) -> "ChatTemplate | None":
        """The model's chat template; None for a model without one. Raises BundleError."""
        from runtime.chat_template import ChatTemplate  # imports jinja2

        return ChatTemplate.load(self._path)

    @cached_property
    def _literal(self) -> Tokenizer:
        """A tokenizer to which special tokens are text like any other."""
        tokenizer = self._read()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def read_files(self) -> None:
        """Read what the first conversation needs, so that a server needs no file then. Raises BundleError."""
        _ = self.template, self._literal

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises RequestError as ``encode`` and ``encode_messages`` do."""
        if prompt.before:
            return self.encode_messages(prompt.messages)
        return self.encode(prompt.text, raw=prompt.raw)

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        options: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the model's next answer begins.

        messages: each with ``role`` and ``content``
        options: further variables of the template; ``tools`` are those that the model may call
        max_tokens: as of ``encode``
        Raises RequestError for what the template refuses, for tools that it does not take, and without a
        template for anything but one message of a user.
        """
        if not messages:
            raise RequestError("must not be empty", field="messages")
        tools = (options or {}).get("tools")
        if tools and (self.template is None or not self.template.takes_tools):
            problem = "the model's chat template takes no tools, got some"
            raise RequestError(problem, field="template_options")
        if self.template is None:
            if options or len(messages) != 1 or messages[0]["role"] != USER:
                raise RequestError(
                    "must be one user message, because the model has no chat template; got "
                    f"{len(messages)} messages, the first of the role {messages[0]['role']}",
                    field="messages",
                )
            return self.encode(messages[0]["content"], max_tokens=max_tokens)
        # The template renders an assistant's text and the options as they are; the mark is in none of them.
        given = json.dumps([*map(dict, messages), options], ensure_ascii=False, default=str)
        mark = _unused_character([given, self.template.source])
        if tools:
            described = self._mark_special(json.dumps(tools, ensure_ascii=False), mark)
            options = {**(options or {}), "tools": json.loads(described)}
        marked = [
            message
            if message["role"] == ASSISTANT
            else {k: self._mark_special(v, mark) if isinstance(v, str) else v for k, v in message.items()}
            for message in messages
        ]
        text = self.template.render(marked, options)
        self._check_length(text, max_tokens, "messages")
        encode_utf8("messages", text)
        return self._encode_marked(text, mark)

    def encode(
        self,
        text: str,
        *,
        raw: bool = False,
        max_tokens: int | None = None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Token ids of a prompt, as a user's message in the chat template unless ``raw``.

        max_tokens: a text too long for so many tokens of any kind is refused before it is tokenized
        add_special_tokens: whether a text that is not put into the chat template gets the tokens that the
            tokenizer puts around every text, such as one for its beginning
        Raises RequestError for an empty prompt.
        """
        if not (text if raw else text.strip()):
            raise RequestError(f"must not be empty, got {text!r:.60}", field="prompt")
        self._check_length(text, max_tokens, "prompt")
        encode_utf8("prompt", text)
        if not raw and (self.prefix or self.suffix):
            mark = _unused_character([text, self.prefix, self.suffix])
            return self._encode_marked(self.prefix + self._mark_special(text, mark) + self.suffix, mark)
        # A batch is encoded without Python's lock.
        (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _check_length(self, text: str, max_tokens: int | None, field: str) -> None:
        if max_tokens is not None and len(text) > max_tokens * self._longest_token:
            raise RequestError(
                f"must be shorter than the context of {max_tokens} tokens, got {len(text)} characters",
                field=field,
            )

    def _mark_special(self, text: str, mark: str) -> str:
        """The text with ``mark`` on both sides of every special token."""
        return text if self._special is None else self._special.sub(rf"{mark}\g<0>{mark}", text)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of a text in the chat template, in which marked special tokens are text.

        A tokenizer may put a space before the parts of a text that is cut at marks.
        """
        ids: list[int] = []
        for index, part in enumerate(text.split(mark)):
            tokenizer = self._literal if index % 2 else self.tokenizer
            # A template contains its special tokens as text.
            (encoding,) = tokenizer.encode_batch([part], add_special_tokens=False)
            ids += encoding.ids
        return ids


def _unused_character(texts: Sequence[str]) -> str:
    """A character for private use that is in none of the texts."""
    return next(c for c in map(chr, range(0xF0000, 0xFFFFD)) if not any(c in text for text in texts))


class Detokenizer:
    """The text of one completion, token by token: whole characters only, cut off before a stop string.

    Text is held back while it ends in a part of a character, or in the beginning of a stop string.
    The joined text equals one decode of all tokens, except for invalid UTF-8 under byte fallback: one decode
    replaces every byte of such a run, while here the whole characters at its start were already emitted. The
    DecodeStream of tokenizers 0.23 raises an error there, or emits a byte's replacement a second time.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        # The tokens whose text was emitted last, their text, and the tokens that came since.
        self._emitted, self._pending = _split_prompt(tokenizer, prompt_ids)
        self._emitted_text = tokenizer.decode(self._emitted)
        # What has been emitted of the pending tokens' text. At first they are the prompt's.
        self._shown = self._decode_pending()[1]
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that can be emitted now, possibly empty.

        Sets ``stopped`` when a stop string is complete; the stop string and what follows it are dropped.
        """
        return self._before_stop(self._step(token_id))

    def flush(self) -> str:
        """The text held back, at the end of all tokens; half of a character is a replacement character."""
        text = self._decode_pending()[1]
        new, self._shown = _after(self._shown, text), text
        new = self._before_stop(new)
        held, self._held = self._held, ""
        return new + held

    def _before_stop(self, text: str) -> str:
        """What can be emitted of the next text, so that no stop string is; ``_held`` is the rest."""
        if self.stopped:
            return ""
        if not self._stop_strings:
            return text
        text = self._held + text
        found = [at for at in map(text.find, self._stop_strings) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = _longest_stop_prefix(text, self._stop_strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _step(self, token_id: int) -> str:
        """The text that no further token can change and that has not been emitted."""
        self._pending.append(token_id)
        alone, text = self._decode_pending()
        if text and not text.endswith(INCOMPLETE):
            new = _after(self._shown, text)
            self._emitted, self._emitted_text, self._pending, self._shown = self._pending, alone, [], ""
            return new
        if self._is_special(token_id):
            self._pending.pop()
            return ""
        # An incomplete character has a byte less than the longest at most. Under byte fallback each byte is a
        # replacement character.
        settled = text[: max(len(text) - MAX_CHARACTER_BYTES + 1, len(text.rstrip(INCOMPLETE)))]
        new = _after(self._shown, settled)
        self._shown = max(self._shown, settled, key=len)
        if len(self._pending) > MAX_PENDING:
            num_held = len(text) - len(self._shown)
            # The first ones stay: they are invalid, so under byte fallback all bytes after them are.
            del self._pending[MAX_CHARACTER_BYTES]
            text = self._decode_pending()[1]
            self._shown = text[: len(text) - num_held]
        return new

    def _decode_pending(self) -> tuple[str, str]:
        """The text of the pending tokens alone, and what they add to the text before them."""
        alone = self._tokenizer.decode(self._pending)
        # Invalid bytes change what the emitted bytes before them decode to, so they are decoded alone. Other
        # tokens are decoded after the emitted ones, because a space at their start would be lost alone.
        if alone.startswith(INCOMPLETE):
            return alone, alone
        return alone, self._tokenizer.decode([*self._emitted, *self._pending])[len(self._emitted_text) :]

    def _is_special(self, token_id: int) -> bool:
        """Whether decoding leaves this token out."""
        decode = self._tokenizer.decode
        return decode([token_id]) != decode([token_id], skip_special_tokens=False)


def _after(shown: str, text: str) -> str:
    """What ``text`` has beyond the beginning that it shares with ``shown``."""
    while not text.startswith(shown):
        shown = shown[:-1]
    return text[len(shown) :]


def _split_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The prompt's last tokens: those of whole characters, and those that may be of an incomplete one.

    Several lengths are tried: under byte fallback half a character at the start makes all bytes after it
    invalid.
    """
    for end in range(len(prompt_ids), max(len(prompt_ids) - MAX_CHARACTER_BYTES, -1), -1):
        for length in range(CONTEXT, CONTEXT + MAX_CHARACTER_BYTES):
            tail = list(prompt_ids[max(end - length, 0) : end])
            if not tokenizer.decode(tail).endswith(INCOMPLETE):
                return tail, list(prompt_ids[end:])
    return [], list(prompt_ids[-MAX_CHARACTER_BYTES:])


def _longest_stop_prefix(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is the beginning of a stop string, but not all of it."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[len(text) - length :]):
                longest = length
                break
    return longest
