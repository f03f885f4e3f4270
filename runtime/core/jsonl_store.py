"""A file of JSON records, one a line, that grows with the work done and can be continued after a stop."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from runtime.core.errors import UserError
from runtime.core.system import lock

# The format that the first line names. It changes when older files cannot be continued.
FORMAT = 1
SHOWN_CHARACTERS = 60


class JsonlStore:
    """Records of work done under the same settings.

    The first line of the file holds the settings. With ``first_field`` every record holds them instead, after
    this field, for files that must hold nothing but records. A process that dies may leave an incomplete last
    line; it is cut off before the next record is written, and by a store that is
    ``alone`` at once. A file that holds anything else is never changed.
    Several processes may add records to one file, unless a store is ``alone``.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        read: Callable[[dict[str, Any]], Any],
        *,
        first_field: str | None = None,
        flag: str = "--out",
        alone: bool = False,
    ):
        """Call ``read`` with every record of the file, if there is one.

        flag: what errors call the file
        alone: hold a lock on the file, which is made, until ``close``; UserError where another store holds it
        Raises UserError for other settings, and for a line that is no record, for which ``read`` raises
        ValueError, KeyError or TypeError.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self._first_field = first_field
        self._flag = flag
        self._end = 0  # of the complete lines that are known, in bytes
        self._held = self._hold() if alone else None
        try:
            self._read_file(read)
            if self._held is not None:  # whoever reads the file next may not know of incomplete lines
                self._cut_rest(self._held)
        except BaseException:
            self.close()
            raise

    def _read_file(self, read: Callable[[dict[str, Any]], Any]) -> None:
        try:
            with self.path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if not line.endswith(b"\n") and (number > 1 or self._may_begin(line)):
                        break
                    self._read_line(number, line, read)
                    self._end += len(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._error("", f"cannot be read: {error.strerror}") from error

    def close(self) -> None:
        """Let others write to a file that was held. One that holds nothing is removed."""
        if self._held is None or self._held.closed:
            return
        if not os.fstat(self._held.fileno()).st_size:
            with suppress(OSError):
                self.path.unlink()
        self._held.close()

    def append(self, *records: Mapping[str, Any]) -> None:
        """Write records; they are on disk before this returns. Raises UserError when that fails."""
        data = b"".join(self._line(record) for record in records)
        try:
            with self._opened() as stream:
                self._end = end = self._cut_rest(stream)
                if data and not end and self._first_field is None:
                    data = self._header() + data
                try:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[stream.write(rest) :]
                    os.fsync(stream.fileno())
                except OSError:
                    os.ftruncate(stream.fileno(), end)
                    raise
        except OSError as error:
            raise self._error("", f"cannot be written: {error.strerror}") from error
        self._end += len(data)

    def _hold(self) -> BinaryIO:
        """The file, locked until it is closed. Raises UserError."""
        try:
            stream = self._open()
            try:
                lock(stream.fileno(), wait=False)
            except BlockingIOError:
                stream.close()
                raise self._error("", "another run writes to this file; wait for its end") from None
        except OSError as error:
            raise self._error("", f"cannot be written: {error.strerror}") from error
        return stream

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """The file, locked within the block."""
        if self._held is not None:
            yield self._held
            return
        with self._open() as stream:
            lock(stream.fileno(), wait=True)
            yield stream

    def _open(self) -> BinaryIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A buffer would write what is left of a record that did not fit after the file was cut.
        return self.path.open("a+b", buffering=0)

    def _cut_rest(self, stream: BinaryIO) -> int:
        """Cut off an incomplete line, and return where the complete ones end, those of others among them."""
        size = stream.seek(0, os.SEEK_END)
        end = stream.seek(min(self._end, size))
        end += stream.read().rfind(b"\n") + 1
        if end < size:
            stream.truncate(end)
        return end

    def _header(self) -> bytes:
        return _encoded({"format": FORMAT, "settings": self._settings})

    def _line(self, record: Mapping[str, Any]) -> bytes:
        if self._first_field is None:
            return _encoded(record)
        return _encoded({self._first_field: record[self._first_field], **self._settings, **record})

    def _may_begin(self, line: bytes) -> bool:
        """Whether an incomplete first line may be this store's."""
        if self._first_field is None:
            return self._header().startswith(line)
        opening = f'{{"{self._first_field}": '.encode()
        return line[: len(opening)] == opening[: len(line)]

    def _read_line(self, number: int, line: bytes, read: Callable[[dict[str, Any]], Any]) -> None:
        where = f":{number}"
        try:
            record = json.loads(line)
            if self._first_field is not None:
                self._compare(where, {name: record[name] for name in self._settings}, self._settings)
                read(record)
            elif number == 1:
                self._compare(where, {"format": record["format"]}, {"format": FORMAT})
                self._compare(where, record["settings"], self._settings)
            else:
                read(record)
        except UserError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = _brief(line.decode(errors="replace").rstrip())
            raise self._error(where, f"expected a record of an earlier run, got {shown}") from error

    def _compare(self, where: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        for name, value in expected.items():
            if found.get(name) != value:
                difference = f"{name}: {', not '.join(_brief_pair(found.get(name), value))}"
                raise self._error(
                    where,
                    f"was written with other settings ({difference}); remove the file to start anew, or "
                    f"give another {self._flag}",
                )

    def _error(self, where: str, problem: str) -> UserError:
        return UserError(f"{self._flag}: {self.path}{where}: {problem}")


def _encoded(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _brief(value: Any) -> str:
    return repr(value)[:SHOWN_CHARACTERS]


def _brief_pair(first: Any, second: Any) -> tuple[str, str]:
    """Both from shortly before their difference on."""
    texts = repr(first), repr(second)
    alike = next((at for at, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(0, alike - SHOWN_CHARACTERS // 2)
    one, other = (("..." if begin else "") + text[begin : begin + SHOWN_CHARACTERS] for text in texts)
    return one, other
