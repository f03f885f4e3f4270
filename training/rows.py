"""Rows of the data: JSON lines or a JSON array, plain or packed by gzip; Parquet; data sets of the hub."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.errors import TrainingError

# The name of a data set on the hub, with a split of it: OWNER/NAME or OWNER/NAME:SPLIT.
DATASET_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]:%+-]+)?")
FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")
DEFAULT_SPLIT = "train"
NUM_SHOWN = 3


class BadRows:
    """What becomes of rows that cannot be used: the first one is an error, or all are counted and skipped.

    first: what is wrong with the first NUM_SHOWN of them, each with its place
    """

    def __init__(self, *, skip: bool = False):
        self._skip = skip
        self.count = 0
        self.first: list[str] = []

    def refuse(self, problem: str) -> None:
        """Raises TrainingError, unless such rows are skipped."""
        if not self._skip:
            raise TrainingError(problem)
        self.count += 1
        if self.count <= NUM_SHOWN:
            self.first.append(problem)


def is_dataset_name(path: Path) -> bool:
    """Whether a value of ``--data`` names a data set of the hub, and no file of this machine."""
    name = str(path)
    is_path = path.exists() or path.name.endswith(FILE_SUFFIXES) or Path(path.parts[0]).exists()
    return not is_path and DATASET_NAME.fullmatch(name) is not None


def read_rows(path: Path, bad: BadRows) -> Iterator[tuple[str, Any]]:
    """Every row of a file: its place, for messages, and its value.

    Raises TrainingError for a file that cannot be read, and for a line that is no JSON unless ``bad`` skips.
    """
    if is_dataset_name(path):
        yield from _dataset_rows(str(path))
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        yield from _json_rows(path, _text(path), bad)


def brief(value: Any) -> str:
    """The beginning of a row, for messages."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return repr(text[:60])


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except FileNotFoundError:
        raise TrainingError(f"--data: {path} does not exist") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TrainingError(f"--data: {path} is no gzip file, or not a whole one: {error}") from error
    except OSError as error:
        raise TrainingError(f"--data: {path} cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TrainingError(f"--data: {path} is not UTF-8 (byte {error.start})") from error


def _json_rows(path: Path, text: str, bad: BadRows) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise TrainingError(f"{path} is not valid JSON: {error}") from error
        for index, row in enumerate(rows):
            yield f"{path}[{index}]", row
        return
    # Not splitlines(): texts hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            bad.refuse(f"{path}:{number}: expected a JSON object, got {brief(line)}")
            continue
        yield f"{path}:{number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise TrainingError(f"--data: {path} does not exist")
    try:
        import pyarrow.parquet
    except ImportError:
        raise _missing(f"{path} is a Parquet file, which needs the package pyarrow") from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}[{number}]", _without_nulls(row)
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TrainingError(f"--data: {path} cannot be read as Parquet: {reason}") from error


def _dataset_rows(name: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise _missing(
            f"{name} is no file; a data set of this name on the Hugging Face hub needs the package datasets"
        ) from None
    repository, _, split = name.partition(":")
    split = split or DEFAULT_SPLIT
    try:
        rows = datasets.load_dataset(repository, split=split)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(
            f"--data: the split {split!r} of the data set {repository} cannot be loaded (add "
            f":SPLIT for another one): {reason}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name}[{number}]", _without_nulls(row)


def _missing(problem: str) -> TrainingError:
    return TrainingError(f"--data: {problem}: pip install 'ctc-speculator[data]'")


def _without_nulls(row: Any) -> Any:
    """A table's row has every column; those that it leaves empty are not there in JSON."""
    return {name: value for name, value in row.items() if value is not None}
