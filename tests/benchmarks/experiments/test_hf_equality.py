"""The checks of plain decoding, on a tiny bundle: both answer, and a wrong output is noticed."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.experiments import hf_equality
from runtime.decoder import SpeculativeDecoder


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.fixture
def argv(tiny_bundle_dir: Path, tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "One?"}\n{"text": "to be continued"}\n')
    argv = ["--bundle", str(tiny_bundle_dir), "--model", str(tiny_model_dir), "--prompts", str(prompts)]
    return [*argv, "--max-new-tokens", "12", "--generate", "1"]


def test_plain_decoding_is_hugging_faces(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert hf_equality.main(argv) == 0
    found = last_line(capsys)
    assert (found["prompts"], found["argmax_equal"] + found["ties"]) == (2, 2)
    assert found["generated_equal"] == found["generated"] == 1


def test_a_wrong_token_is_noticed(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = SpeculativeDecoder.stream

    def wrong(self: SpeculativeDecoder, *args: Any, **options: Any) -> Iterator[Any]:
        for chunk in stream(self, *args, **options):
            yield SimpleNamespace(token_ids=[(token + 1) % 256 for token in chunk.token_ids])

    monkeypatch.setattr(SpeculativeDecoder, "stream", wrong)
    assert hf_equality.main(argv) == 1
    assert last_line(capsys)["generated_equal"] == 0


def test_bad_input_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert hf_equality.main([*argv, "--bundle", "absent"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["hf_equality: absent is no engine bundle: bundle.json is missing"]
