"""Calls of tools in a model's text, read as it comes, in the forms that models are trained to write.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, also Qwen's; one after the other
    llama3   {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>; several with ; between them
    mistral  [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]

Markers that are special tokens are no part of a text, so a call of the last two forms may begin without one.
What looks like a call and is none, or is one of an unknown tool, stays text.
"""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class ToolForm:
    """How a model writes calls.

    name: of the form
    marker: comes before calls
    bare: what calls may begin with, at the beginning of a text, without a marker; empty for nothing
    between: characters that may stand around and between calls
    closing: comes after calls; empty for nothing
    arguments: the key of a call's arguments
    """

    name: str
    marker: str
    bare: str
    between: str
    closing: str
    arguments: str


HERMES = ToolForm("hermes", "<tool_call>", "", " \n\r\t", "</tool_call>", "arguments")
LLAMA3 = ToolForm("llama3", "<|python_tag|>", "{", " \n\r\t;", "", "parameters")
MISTRAL = ToolForm("mistral", "[TOOL_CALLS]", "[", " \n\r\t[,", "]", "arguments")
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \n\r\t"


def form_of_template(source: str) -> ToolForm | None:
    """The form of calls in a chat template; None for one that has none of them."""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ("ipython" in source and '"parameters"' in source):
        return LLAMA3
    return None


@dataclass(frozen=True)
class Part:
    """A part of an answer: text, or what is new of the call ``index``.

    name, identifier: of a call that begins
    text: of the answer, or of the call's arguments as JSON
    """

    text: str = ""
    index: int | None = None
    name: str | None = None
    identifier: str | None = None


class CallReader:
    """Reads one call, a JSON object, character by character.

    arguments: the JSON text of its arguments, as far as it has come
    is_broken: it is no JSON object of a name and arguments
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.is_done = self.is_broken = False
        self._depth = 0
        self._in_string = self._is_escaped = False
        # At depth 1: the key of the value that is being read, or None while a key is; and its text.
        self._key: str | None = None
        self._token = ""
        # Whether that value has ended, so that nothing more belongs to it.
        self._is_complete = False

    def read(self, character: str) -> bool:
        """Returns whether the character is part of the call. One that is not shows that it has ended."""
        if self._is_complete and character not in ",]}":
            if character in SPACE:
                return True
            # A model may forget the last brace.
            self._end_value()
            self.is_done = not self.is_broken and self.name is not None and self.arguments != ""
            self.is_broken = not self.is_done
            return False
        self._read(character)
        return True

    def _read(self, character: str) -> None:
        if self._in_string:
            self._take(character)
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                self._is_complete = self._depth == 1 and self._key is not None
            return
        if character in "]}":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()
                self.is_done = not self.is_broken
                return
        elif self._depth == 1 and character == ":" and self._key is None:
            key = _parsed(self._token)
            self.is_broken |= not isinstance(key, str)
            # Of several arguments the first ones count, which may have been sent already.
            is_ignored = key in ARGUMENT_KEYS and self.arguments != ""
            self._key, self._token = key if isinstance(key, str) and not is_ignored else "", ""
            return
        elif self._depth == 1 and character == ",":
            self._end_value()
            return
        if self._depth:
            self._take(character)
        if character in "]}":
            self._is_complete = self._depth == 1 and self._key is not None
        elif character in "[{":
            self._depth += 1
        elif character == '"':
            self._in_string = True

    def _take(self, character: str) -> None:
        if self._token or character not in SPACE:
            self._token += character
            if self._key in ARGUMENT_KEYS:
                self.arguments = self._token

    def _end_value(self) -> None:
        token = self._token.rstrip()
        if self._key == "name":
            name = _parsed(token)
            self.name = name if isinstance(name, str) else None
            self.is_broken |= self.name is None
        elif self._key in ARGUMENT_KEYS:
            self.arguments = token
            self.is_broken |= not isinstance(_parsed(token), dict)
        elif token and self._key is None:
            self.is_broken = True
        self._key, self._token, self._is_complete = None, "", False


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class ToolParser:
    """Takes a text part after part, and tells its calls from the rest.

    names: of the tools that may be called
    is_parallel: whether there may be several calls; if not, those after the first are left out
    num_calls: calls that have begun
    """

    def __init__(self, form: ToolForm, names: Collection[str], *, is_parallel: bool = True):
        self._form = form
        self._names = names
        self._is_parallel = is_parallel
        self.num_calls = 0
        self._buffer = ""
        self._is_start, self._is_after_calls = True, False
        # Where calls are: the text since the marker, which stays text if no call follows.
        self._among_calls = False
        self._raw = ""
        # Whether a call has come since the marker.
        self._has_read = False
        self._reader: CallReader | None = None
        self._is_begun = False
        self._num_sent = 0

    def feed(self, text: str) -> list[Part]:
        """What is new with this text."""
        self._buffer += text
        parts: list[Part] = []
        while self._buffer:
            before = len(self._buffer), self._among_calls, self._reader is None
            if self._reader is not None:
                self._read_call(parts)
            elif self._among_calls:
                self._between_calls(parts)
            else:
                self._read_text(parts)
            if (len(self._buffer), self._among_calls, self._reader is None) == before:
                break  # more text decides
        return [part for part in parts if part.text or part.name]

    def end(self) -> list[Part]:
        """What is left at the end of the text."""
        is_later = self.num_calls > 0 and not self._is_parallel
        is_unwanted = is_later and self._reader is not None and self._reader.name in self._names
        rest = "" if self._is_begun or is_unwanted else self._raw
        rest += "" if self._among_calls and self._has_read else self._buffer
        self._buffer = self._raw = ""
        parts: list[Part] = []
        self._emit(parts, rest)
        return parts

    def _read_text(self, parts: list[Part]) -> None:
        form, buffer = self._form, self._buffer
        if self._is_start and form.bare:
            stripped = buffer.lstrip()
            if not stripped:
                return
            is_marker = stripped.startswith(form.marker) or form.marker.startswith(stripped)
            if stripped.startswith(form.bare) and not is_marker:
                self._enter(0, 0)
                return
            if len(stripped) < len(form.marker) and is_marker:
                return  # more text tells a marker from a call without one, or from text
        at = buffer.find(form.marker)
        if at >= 0:
            self._emit(parts, buffer[:at])
            self._enter(at, at + len(form.marker))
            return
        kept = _partial(buffer, form.marker)
        self._emit(parts, buffer[: len(buffer) - kept])
        self._buffer = buffer[len(buffer) - kept :]

    def _emit(self, parts: list[Part], text: str) -> None:
        if self._is_after_calls:  # white space there is nobody's text
            text = text.lstrip()
        if text:
            parts.append(Part(text))
            self._is_start = self._is_after_calls = False

    def _enter(self, start: int, end: int) -> None:
        """Go on with the text from ``end`` on, where a call is expected."""
        self._among_calls, self._has_read = True, False
        self._raw, self._buffer = self._buffer[start:end], self._buffer[end:]

    def _between_calls(self, parts: list[Part]) -> None:
        form, buffer = self._form, self._buffer
        rest = buffer.lstrip(form.between)
        self._raw += buffer[: len(buffer) - len(rest)]
        self._buffer = rest
        if rest.startswith("{"):
            self._reader, self._is_begun, self._num_sent = CallReader(), False, 0
        elif form.closing and rest.startswith(form.closing) and self._has_read:
            self._among_calls, self._raw, self._buffer = False, "", rest[len(form.closing) :]
            self._is_start, self._is_after_calls = False, self.num_calls > 0
        elif rest and not (form.closing.startswith(rest) and rest != form.closing):
            self._give_up(parts)

    def _give_up(self, parts: list[Part]) -> None:
        """What was taken for a call is text."""
        self._is_start = False
        self._emit(parts, self._raw)
        self._reader, self._among_calls, self._raw = None, False, ""

    def _read_call(self, parts: list[Part]) -> None:
        reader = self._reader
        assert reader is not None
        count = 0
        while count < len(self._buffer) and not (reader.is_done or reader.is_broken):
            count += reader.read(self._buffer[count])
        self._raw, self._buffer = self._raw + self._buffer[:count], self._buffer[count:]
        is_known = reader.name in self._names
        if not self._is_begun and (reader.is_broken or (reader.name is not None and not is_known)):
            self._give_up(parts)
            return
        is_wanted = self._is_parallel or self.num_calls == 0 or (self._is_begun and self.num_calls == 1)
        has_arguments = reader.is_done or reader.arguments.startswith("{")
        if is_known and reader.name is not None and has_arguments and is_wanted:
            if not self._is_begun:
                self._is_begun, self.num_calls = True, self.num_calls + 1
                parts.append(Part("", self.num_calls - 1, reader.name, _identifier(self._form)))
            arguments = reader.arguments or "{}"
            parts.append(Part(arguments[self._num_sent :], self.num_calls - 1))
            self._num_sent = len(arguments)
        if reader.is_done or reader.is_broken:
            if reader.is_done and not is_known:
                self._give_up(parts)
                return
            self._reader, self._is_begun, self._raw, self._has_read = None, False, "", True


def _identifier(form: ToolForm) -> str:
    """Mistral's templates want nine letters and digits."""
    text = uuid.uuid4().hex
    return text[:9] if form is MISTRAL else f"call_{text[:24]}"


def _partial(text: str, marker: str) -> int:
    """Length of the longest end of a text that is the beginning of the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if marker.startswith(text[-n:])), 0)
