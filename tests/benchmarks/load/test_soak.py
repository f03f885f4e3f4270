"""A few seconds of mixed load: it passes, and a wrong text is noticed."""

import json
from pathlib import Path

import pytest

from benchmarks.load import soak


@pytest.fixture
def argv(tiny_bundle_dir: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("How many?", "Why?", "x")))
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    return [*argv, "--minutes", "0.05", "--streams", "6", "--threads", "1"]


def test_mixed_load(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few seconds are no time for memory to settle.
    monkeypatch.setattr(soak, "MOST_GROWTH", 2.0)
    assert soak.main(argv) == 0
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert report["counts"]["the same"] > 10
    assert report["counts"]["left"] > 0
    assert report["counts"].get("different", 0) == report["counts"].get("failed", 0) == 0
    assert report["server_exit_status"] == 0


def test_a_wrong_text_is_noticed(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = soak.make_questions

    def spoilt(*args: object) -> list[soak.Question]:
        questions = make(*args)  # type: ignore[arg-type]
        return [soak.Question(question.options, question.expected + "!") for question in questions]

    monkeypatch.setattr(soak, "make_questions", spoilt)
    assert soak.main(argv) == 1


def test_bad_input_is_one_line(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([*argv, "--streams", "0"]) == 2
    assert soak.main([*argv, "--bundle", "absent"]) == 2
    captured = capsys.readouterr().err.splitlines()
    assert captured[0].startswith("soak: --streams: must be a whole number of at least 1")
    assert "absent is no engine bundle" in captured[1]


def test_memory_is_compared_over_parts_of_the_run() -> None:
    rising = [*range(10), *[10, 11, 12, 90, 10, 11], *[30] * 20]
    assert soak.settled_memory([float(x) for x in rising]) == (8.5, 30.0)
    assert soak.settled_memory([5.0]) == (5.0, 5.0)
