"""The load generator: its arithmetic, its errors, and one small run against real servers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from benchmarks.load import serving
from benchmarks.load.clients import Served


def served(prompt: int, begin: float, times: tuple[float, ...], counts: tuple[int, ...]) -> Served:
    return Served(prompt, begin, times, counts, "text")


def test_times_of_a_request() -> None:
    found = served(0, 1.0, (1.5, 1.6, 2.0), (1, 3, 6))
    assert found.num_tokens == 6
    assert found.first_ms == pytest.approx(500)
    assert found.token_ms == pytest.approx(100)
    assert found.longest_ms == pytest.approx(400)
    assert served(0, 1.0, (1.5,), (1,)).longest_ms == 0


def test_summary_of_a_load() -> None:
    fast, slow = served(0, 0.0, (1.0, 2.0), (1, 11)), served(1, 1.0, (2.0, 5.0), (1, 11))
    found = serving.summary([fast, slow])
    assert found["requests"] == 2
    assert found["tokens_per_second"] == pytest.approx(22 / 5)
    assert found["token_ms"]["p50"] == pytest.approx(200)
    assert found["slowest_share"] == pytest.approx(1.5)
    # Texts that end with their first token.
    assert serving.summary([served(0, 0.0, (1.0,), (1,))])["slowest_share"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--streams", "1,0"], "--streams: must be a whole number of at least 1, got '0'"),
        (["--rates", "x"], "--rates: must be a number above 0, got 'x'"),
        (["--rates", "1,nan"], "--rates: must be a number above 0, got 'nan'"),
        (["--rates", "inf"], "--rates: must be a number above 0, got 'inf'"),
        (["--prompts", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--bundle", "absent"], "absent is no engine bundle"),
    ],
)
def test_bad_input_is_one_line(
    tiny_bundle_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert serving.main([*argv, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_the_server_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: Any) -> int:
        raise InferenceServerException("the prompt has 5,000 tokens", status="INVALID_ARGUMENT")

    monkeypatch.setattr(serving, "measure", refuse)
    assert serving.main(["--bundle", "b", "--prompts", "p", "--out", str(tmp_path / "out")]) == 2
    found = capsys.readouterr().err
    assert found.startswith("serving: --prompts: the server refuses one of them: ")
    assert found.count("\n") == 1


def test_a_small_run(
    shared_server: None, tiny_bundle_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("How many?", "Why?", "x")))
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    argv += ["--streams", "1,3", "--rates", "20", "--requests", "4", "--max-new-tokens", "12"]
    assert serving.main([*argv, "--max-num-seqs", "3", "--num-nodes", "4", "--threads", "1"]) == 0
    report = json.loads((tmp_path / "out" / "serving.json").read_text())
    loads = [(row["streams"], row["rate"], row["method"], row["requests"]) for row in report["rows"]]
    assert loads == [
        (1, None, "draft", 4),
        (1, None, "plain", 4),
        (3, None, "draft", 6),
        (3, None, "plain", 6),
        (None, 20.0, "draft", 4),
        (None, 20.0, "plain", 4),
    ]
    assert report["different_texts"] == 0
    assert "all 3 texts are the same" in capsys.readouterr().out
    assert (tmp_path / "out" / "serving.svg").read_text().startswith("<?xml")


def test_conversations_are_held_together(
    shared_server: None, tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": "Why?"}\n')
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    argv += ["--conversations", "3", "--at-a-time", "2", "--max-new-tokens", "3", "--threads", "1"]
    argv += ["--max-num-seqs", "3", "--num-nodes", "4"]
    started = []
    start = serving.running_server

    def running_server(*arguments: Any) -> Any:
        started.append(arguments[2:])
        return start(*arguments)

    monkeypatch.setattr(serving, "running_server", running_server)
    assert serving.main(argv) == 0
    sizes = "--max-num-seqs", "3", "--num-nodes", "4", "--prefix-cache-mb"
    assert started == [(*sizes, "0"), (*sizes, "512")]
    report = json.loads((tmp_path / "out" / "conversations.json").read_text())
    assert (report["conversations"], report["at_a_time"]) == (3, 2)
    lengths = [row["prompt_tokens"] for row in report["rows"]]
    assert len(lengths) == 4
    assert lengths == sorted(lengths)
    assert [row["different_texts"] for row in report["rows"]] == [0] * 4
    # The same server twice: a text that a second server writes otherwise is noticed.
    texts = iter(f"text {number}" for number in range(100))
    make = serving.converse

    async def differs(*arguments: Any, **options: Any) -> list[list[Served]]:
        found = await make(*arguments, **options)
        return [[replace(turn, text=next(texts)) for turn in turns] for turns in found]

    monkeypatch.setattr(serving, "converse", differs)
    assert serving.main(argv) == 1
