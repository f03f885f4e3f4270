"""What ``auto`` costs with a head that is never right."""

import json
from pathlib import Path

import pytest

from benchmarks.experiments import useless_head


def test_no_draft_is_accepted_and_texts_are_plain_decoding_s(
    tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "few.jsonl"
    prompts.write_text('{"prompt": "How many?"}\n{"prompt": "Why not?"}\n')
    arguments = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--max-new-tokens", "40"]
    assert useless_head.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    (row,) = json.loads((tmp_path / "out" / "useless_head.json").read_text())["rows"]
    assert row["prompts"] == "few"
    assert row["plain_ms"] > 0
    assert row["auto_ms"] > 0
    assert 0 < row["drafted_share"] < 1
    assert "| few |" in capsys.readouterr().out
