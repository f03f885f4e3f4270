"""A file of answers that grows line by line and survives being interrupted at any point."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from training.errors import TrainingError

# How every row begins, so that a line cut off anywhere is told from a file of something else.
OPENING = b'{"id": "'


class AnswerFile:
    """One JSON object a line: ``id``, the settings all answers share, and the answer.

    ids: of the answers in the file. A last line that an interrupted write left incomplete is cut off.
    Raises TrainingError for a file that holds anything but answers to the same settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._path = path
        self._settings = settings
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream: IO[bytes] = path.open("a+b")
            self.ids = set(self._recover())
        except OSError as error:
            raise self._unusable(error) from error

    def append(self, answer_id: str, fields: dict[str, Any]) -> None:
        """Write an answer, as far as the operating system; raises TrainingError when it cannot."""
        row = {"id": answer_id, **self._settings, **fields}
        try:
            self._stream.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            self._stream.flush()
        except OSError as error:
            raise self._unusable(error) from error
        self.ids.add(answer_id)

    def close(self) -> None:
        # What could not be written has been reported by append().
        with contextlib.suppress(OSError):
            self._stream.close()

    def _recover(self) -> Iterator[str]:
        self._stream.seek(0)
        end = 0
        for number, line in enumerate(self._stream, 1):
            if not line.endswith(b"\n") and line[: len(OPENING)] == OPENING[: len(line)]:
                break
            where = f"--out: {self._path}:{number}"
            try:
                row = json.loads(line)
                found = {name: row[name] for name in ("id", *self._settings)}
            except (ValueError, TypeError, KeyError) as error:
                shown = line[:60].decode(errors="replace").rstrip()
                raise TrainingError(
                    f"{where}: expected an answer of an earlier run, got {shown!r}"
                ) from error
            for name, value in self._settings.items():
                if found[name] != value:
                    raise TrainingError(
                        f"{where}: was written with {name} {found[name]!r}, not {value!r}; give another --out"
                    )
            yield str(found["id"])
            end += len(line)
        self._stream.truncate(end)

    def _unusable(self, error: OSError) -> TrainingError:
        return TrainingError(f"--out: {self._path} cannot be written: {error.strerror}")
