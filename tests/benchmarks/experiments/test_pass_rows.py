"""The table of passes by their rows: every bundle and number of rows, and one line for bad input."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import pass_rows


def test_every_bundle_and_number_of_rows(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundles", str(tiny_bundle_dir), "--rows", "1,5", "--length", "30", "--repeats", "2"]
    assert pass_rows.main([*argv, "--threads", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "pass_rows.json").read_text())
    assert [(row["rows"], len(row["ms"])) for row in report["rows"]] == [(1, 2), (5, 2)]
    assert (tmp_path / "pass_rows.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 0,2", "--rows: must be whole numbers of at least 1 with commas between, got '0,2'"),
        ("--rows many", "--rows: must be whole numbers of at least 1"),
        ("--length 500", "--length: with 17 rows must be at most 495, got 500"),
    ],
)
def test_bad_input(
    arguments: str, message: str, tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--bundles", str(tiny_bundle_dir), "--out", str(tmp_path / "out"), *arguments.split()]
    assert pass_rows.main(argv) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
