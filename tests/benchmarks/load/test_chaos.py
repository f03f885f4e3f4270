"""The limits of a run with faults. Its clients are those of the tests of the supervisor."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import chaos


def test_what_is_too_late_is_a_problem() -> None:
    kept = chaos.Round("fault", 9.9, 4.9, 16.9)
    late = chaos.Round("fault", 10.1, 5.1, 17.1)
    for found in (kept, late):
        chaos._check(found, load_seconds=12.0)
    assert kept.problems == []
    assert late.problems == [
        "streams have ended after 10.1 s, expected at most 10.0",
        "not ready after 5.1 s, expected at most 5.0",
        "ready again after 17.1 s, expected at most 17.0",
    ]


def test_a_stream_that_ends_without_a_word_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(server: Any) -> Iterator[str]:
        yield "a part"
        raise chaos.CutOffError("an interface")

    server: Any = None
    monkeypatch.setattr(chaos, "INTERFACES", (cut_off,))
    load = chaos.Load(server)
    assert load.reasons() == ["CutOffError: an interface"]
    load.__exit__()
    assert "streams ended without a word" in chaos._cut_off(load)[0]


def test_a_directory_without_a_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no engine bundle" in line
