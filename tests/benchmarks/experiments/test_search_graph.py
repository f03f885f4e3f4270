"""The report of the search in fixed shapes."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import search_graph


def test_the_report_says_where_it_was_measured(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "few.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "How many?"}\n')
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--random", "2", "--real", "1"]
    assert search_graph.main([*arguments, "--out", str(out)]) == 0
    report = json.loads((out / "search_graph.json").read_text())
    assert report.keys() == {"rows", "command", "machine", "versions", "bundle"}
    found = [(row["lattices"], row["number"], row["nodes"]) for row in report["rows"]]
    assert found == [(kind, n, nodes) for kind, n in (("random", 2), ("real", 1)) for nodes in (8, 16, 32)]
    assert all(0 < row["least"] <= row["mean"] <= 1.001 for row in report["rows"])
    table = (out / "search_graph.md").read_text()
    assert len(table.splitlines()) == 2 + 6
    assert table in capsys.readouterr().out
