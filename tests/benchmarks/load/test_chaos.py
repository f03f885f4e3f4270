"""The limits of a run with faults. Its clients are those of the tests of the supervisor."""

from pathlib import Path

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


def test_a_directory_without_a_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no engine bundle" in line
