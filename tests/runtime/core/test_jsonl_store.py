"""The store of records: continued after an interruption at any byte, and nobody else's file is touched."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.core.errors import UserError
from runtime.core.jsonl_store import JsonlStore

SETTINGS = {"model": "tiny", "sizes": (8, 16)}
RECORDS = [{"id": "a", "text": "ü\u2028x"}, {"id": "b", "text": "y\nz"}, {"id": "c", "text": ""}]


def open_store(
    path: Path, first_field: str | None, *, alone: bool = False, **changed: Any
) -> tuple[JsonlStore, list[Any]]:
    """A store, and the records found in its file without the settings that may stand in them."""
    found: list[Any] = []

    def read(record: dict[str, Any]) -> None:
        found.append({name: record[name] for name in ("id", "text")})

    return JsonlStore(path, SETTINGS | changed, read, first_field=first_field, alone=alone), found


@pytest.fixture(params=[None, "id"], ids=["header", "settings in every record"])
def first_field(request: pytest.FixtureRequest) -> str | None:
    name: str | None = request.param
    return name


def test_layout(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    store, _ = open_store(path, None)
    assert not path.parent.exists()
    store.append(RECORDS[0])
    header = {"format": 1, "settings": {"model": "tiny", "sizes": [8, 16]}}
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [header, RECORDS[0]]
    path.unlink()
    store, _ = open_store(path, "id")
    store.append(RECORDS[0])
    (line,) = path.read_bytes().splitlines()
    assert list(json.loads(line).items()) == [
        ("id", "a"),
        ("model", "tiny"),
        ("sizes", [8, 16]),
        ("text", "ü\u2028x"),
    ]


def test_a_store_that_is_alone_makes_its_file_and_keeps_others_away(
    tmp_path: Path, first_field: str | None
) -> None:
    path = tmp_path / "new" / "out.jsonl"
    store, _ = open_store(path, first_field, alone=True)
    assert path.read_bytes() == b""
    store.append(*RECORDS[:2])
    with pytest.raises(UserError, match=r"^--out: .*/out\.jsonl: another run writes to this file; wait"):
        open_store(path, first_field, alone=True)
    store.append(RECORDS[2])
    store.close()
    again, found = open_store(path, first_field, alone=True)
    again.close()
    assert found == RECORDS
    empty, _ = open_store(tmp_path / "empty.jsonl", first_field, alone=True)
    empty.close()
    empty.close()
    assert not (tmp_path / "empty.jsonl").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--out: .*/file/x: cannot be written: "):
        open_store(tmp_path / "file" / "x", first_field, alone=True)


def test_an_error_while_reading_lets_others_in(tmp_path: Path, first_field: str | None) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("no record\n")
    for _ in range(2):
        with pytest.raises(UserError, match="expected a record of an earlier run") as error:
            open_store(path, first_field, alone=True)
        assert error.value.__traceback__ is not None  # which keeps the store alive
    assert path.read_text() == "no record\n"


def test_continued_after_an_interruption_at_any_byte(tmp_path: Path, first_field: str | None) -> None:
    """What was complete is read, what is missing is written again, and the file becomes the same."""
    path = tmp_path / "out.jsonl"
    store, _ = open_store(path, first_field)
    for record in RECORDS:
        store.append(record)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        store, found = open_store(path, first_field)
        assert found == RECORDS[: len(found)]
        complete = whole[:length].count(b"\n") - (first_field is None)
        assert len(found) == max(complete, 0)
        assert path.read_bytes() == whole[:length]  # reading changes nothing
        for record in RECORDS[len(found) :]:
            store.append(record)
        assert path.read_bytes() == whole


def test_a_failed_write_leaves_no_half_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    store, _ = open_store(path, None)
    store.append(RECORDS[0])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            store.append(RECORDS[1])
    store.append(RECORDS[2])
    assert open_store(path, None)[1] == [RECORDS[0], RECORDS[2]]


@pytest.mark.parametrize("limit", [40, 600, 2_500])
def test_a_record_that_does_not_fit_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """A real limit of the system, in a process of its own. Buffers would write the rest after the failure."""
    path = tmp_path / "out.jsonl"
    store, _ = open_store(path, "id")
    store.append(RECORDS[0])
    whole = path.read_bytes()
    script = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from runtime.core.jsonl_store import JsonlStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "store = JsonlStore(Path(sys.argv[1]), {}, print, first_field='id')\n"
        "limit = Path(sys.argv[1]).stat().st_size + int(sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        "store.append(*({'id': str(i), 'text': 'x' * 300} for i in range(12)))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(path), str(limit)], capture_output=True, text=True, check=False
    )
    assert "cannot be written: File too large" in run.stderr
    assert path.read_bytes() == whole


def test_other_settings_are_shown_from_their_difference_on(tmp_path: Path) -> None:
    path, name = tmp_path / "out.jsonl", "a-model-with-a-long-name-" * 4
    open_store(path, "id", model=f"{name} 1234")[0].append(RECORDS[0])
    with pytest.raises(UserError, match=r"\(model: \.\.\..{0,40} 1234', not \.\.\..{0,40} 1234 bf16'\)"):
        open_store(path, "id", model=f"{name} 1234 bf16")


def test_two_runs_share_a_file(tmp_path: Path, first_field: str | None) -> None:
    path = tmp_path / "out.jsonl"
    stores = [open_store(path, first_field)[0] for _ in range(2)]
    for store, record in zip((*stores, stores[0]), RECORDS, strict=True):
        store.append(record)
    assert open_store(path, first_field)[1] == RECORDS
    # Both runs know the end of the same incomplete line, and only the first one cuts it off.
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    stores = [open_store(path, first_field)[0] for _ in range(2)]
    for store in stores:
        store.append(RECORDS[2])
    assert open_store(path, first_field)[1] == [*RECORDS, RECORDS[2]]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "other"}, "model: 'tiny', not 'other'"),
        ({"sizes": (8,)}, r"sizes: \[8, 16\], not \[8\]"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, first_field: str | None, changed: dict[str, Any], message: str
) -> None:
    path = tmp_path / "out.jsonl"
    open_store(path, first_field)[0].append(RECORDS[0])
    with pytest.raises(
        UserError, match=rf"^--out: {path}:1: was written with other settings \({message}\); remove the file"
    ):
        open_store(path, first_field, **changed)


@pytest.mark.parametrize(
    "content",
    [b'{"prompt": "hi"}\n', b'{"prompt": "hi"', b"notes", b"[1]\n", b"\n", b"\xff\n", b'{"id": "x"}\n', b"3"],
)
def test_a_foreign_file_is_refused_and_left_alone(
    tmp_path: Path, first_field: str | None, content: bytes
) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"^--out: {path}:1: expected a record of an earlier run, got '"):
        open_store(path, first_field)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line",
    ["{}", "not JSON", '{"format": 1, "settings": {}}', "[]", '{"id": "x"}', "[" * 100_000 + "]" * 100_000],
    ids=range(6),
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, first_field: str | None, line: str) -> None:
    path = tmp_path / "out.jsonl"
    store, _ = open_store(path, first_field)
    store.append(RECORDS[0])
    before = path.read_text()
    path.write_text(before + line + "\n")
    number = before.count("\n") + 1
    with pytest.raises(UserError, match=rf"^--out: {path}:{number}: expected a record of an earlier run"):
        open_store(path, first_field)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"format": 0, "settings": {}}\n')
    with pytest.raises(UserError, match=r"was written with other settings \(format: 0, not 1\)"):
        open_store(path, None)


def test_a_place_that_cannot_be_read_is_named(tmp_path: Path, first_field: str | None) -> None:
    with pytest.raises(UserError, match=rf"^--cache-dir: {tmp_path}: cannot be read: "):
        JsonlStore(tmp_path, {}, lambda record: None, first_field=first_field, flag="--cache-dir")
