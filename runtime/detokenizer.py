"""Token ids to text as they come: whole characters only, stop strings cut off."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# What bytes that are no whole character decode to.
INCOMPLETE = "\ufffd"


class Detokenizer:
    """Incremental decoding of one completion.

    Text is held back while it ends in an incomplete character, or in what may become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        # The prompt's end decides whether the first token begins with a space. What it ends in may be
        # part of a character: those tokens are pushed, so that they wait for the rest of it.
        tail = list(prompt_ids[-8:])
        whole = len(tail)
        while whole and tokenizer.decode(tail[:whole]).endswith(INCOMPLETE):
            whole -= 1
        self._stream = DecodeStream(ids=tail[:whole], skip_special_tokens=True)
        for token_id in tail[whole:]:
            self._stream.step(tokenizer, token_id)
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token, possibly empty.

        Sets ``stopped`` when a stop string is complete; its text and all after it is dropped.
        """
        text = self._stream.step(self._tokenizer, token_id)
        if text is None or self.stopped:
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


def _longest_stop_prefix(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string begins with."""
    longest = 0
    for stop in stop_strings:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if stop.startswith(text[len(text) - length :]):
                longest = length
                break
    return longest
