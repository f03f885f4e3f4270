"""Token ids to text as they come: whole characters only, stop strings cut off."""

from collections.abc import Sequence

from tokenizers import Tokenizer

# What bytes that are no whole character decode to.
INCOMPLETE = "\ufffd"
# Tokens of the prompt that decide whether the first token's text begins with a space.
CONTEXT = 8
# A character has at most as many bytes, of which each may be a token.
MOST_BYTES = 4


class Detokenizer:
    """Incremental decoding of one completion.

    Text is held back while it ends in an incomplete character, or in what may become a stop string. The
    joined text is that of the tokens decoded at once, up to one case: a tokenizer with byte fallback
    decodes neighbouring byte tokens that are no valid UTF-8 to a replacement each. Here only those are
    replaced that follow the last whole character, which was emitted before they came.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        # Tokens whose text was emitted last, that text, and the tokens held since.
        self._emitted, incomplete = _split_prompt(tokenizer, prompt_ids)
        self._emitted_text = tokenizer.decode(self._emitted)
        self._pending: list[int] = []
        for token_id in incomplete:
            self._step(token_id)
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, possibly empty.

        Sets ``stopped`` when a stop string is complete; its text and all after it is dropped.
        """
        text = self._step(token_id)
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

    def flush(self) -> str:
        """Text held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text

    def _step(self, token_id: int) -> str:
        """The text of all held tokens, if it ends in a whole character."""
        self._pending.append(token_id)
        text = self._tokenizer.decode([*self._emitted, *self._pending])
        if len(text) <= len(self._emitted_text) or text.endswith(INCOMPLETE):
            return ""
        pending_text = self._tokenizer.decode(self._pending)
        # Invalid bytes change what the bytes before them decode to; others may begin with a space, which
        # is lost when they are decoded alone.
        invalid = pending_text.startswith(INCOMPLETE)
        new = pending_text if invalid else text[len(self._emitted_text) :]
        self._emitted, self._emitted_text, self._pending = self._pending, pending_text, []
        return new


def _split_prompt(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """The prompt's last tokens: whole characters, and what follows them of another.

    Several lengths are tried because, with byte fallback, half a character at the start spoils the rest.
    """
    for end in range(len(prompt_ids), max(len(prompt_ids) - MOST_BYTES, -1), -1):
        for length in range(CONTEXT, CONTEXT + MOST_BYTES):
            tail = list(prompt_ids[max(end - length, 0) : end])
            if not tokenizer.decode(tail).endswith(INCOMPLETE):
                return tail, list(prompt_ids[end:])
    return [], []


def _longest_stop_prefix(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[len(text) - length :]):
                longest = length
                break
    return longest
