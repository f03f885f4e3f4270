"""A few seconds of mixed load: it passes, and a wrong text is noticed."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load import soak
from runtime.core.prompts import Prompt
from triton_repo.triton.grpc_client import prompt_options


class Clock:
    """Time passes with every look at it: a run has as many requests on a slow machine as on a fast one."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.02
        return self.now


@pytest.fixture
def argv(tiny_bundle_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of three seconds by ``Clock``, which is at least a hundred requests."""
    monkeypatch.setattr(soak, "time", Clock())
    monkeypatch.setattr(soak, "NUM_QUESTIONS", 16)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("How many?", "Why?", "x")))
    argv = ["--bundle", str(tiny_bundle_dir), "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    return [*argv, "--minutes", "0.05", "--streams", "8", "--threads", "1"]


def test_mixed_load(
    shared_server: None, argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few seconds are no time for memory to settle.
    monkeypatch.setattr(soak, "MOST_GROWTH", 2.0)
    assert soak.main(argv) == 0
    report = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert report["counts"]["the same"] > 50
    assert report["counts"]["left"] > 0
    assert report["counts"]["refused"] > 0
    assert report["counts"].get("different", 0) == report["counts"].get("failed", 0) == 0
    assert report["slots_are_free_afterwards"]
    assert report["server_exit_status"] == 0


def test_a_wrong_text_is_noticed(
    shared_server: None, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = soak.make_questions

    def spoilt(*args: Any) -> list[soak.Question]:
        return [soak.Question(question.options, question.expected + "!") for question in make(*args)]

    async def not_asked(*args: Any) -> bool:
        return True

    monkeypatch.setattr(soak, "make_questions", spoilt)
    monkeypatch.setattr(soak, "served_together", not_asked)
    assert soak.main([*argv, "--minutes", "0.01"]) == 1


def test_bad_input_is_one_line(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main([*argv, "--streams", "0"]) == 2
    assert soak.main([*argv, "--bundle", "absent"]) == 2
    assert soak.main([*argv, "--minutes", "nan"]) == 2
    captured = capsys.readouterr().err.splitlines()
    assert captured[0].startswith("soak: --streams: must be a whole number of at least 1")
    assert "absent is no engine bundle" in captured[1]
    assert captured[2] == "soak: --minutes: must be a number above 0, got 'nan'"


def test_memory_is_compared_over_parts_of_the_run() -> None:
    rising = [*range(10), *[10, 11, 12, 90, 10, 11], *[30] * 20]
    assert soak.settled_memory([float(x) for x in rising]) == (8.5, 30.0)
    assert soak.settled_memory([5.0]) == (5.0, 5.0)


def test_a_conversation_reaches_an_openai_client() -> None:
    prompt = Prompt("Why?", before=({"role": "system", "content": "Be short."},))
    asked: list[Any] = []

    async def create(messages: Any, **_: Any) -> Any:
        asked.append(messages)
        raise InterruptedError

    completions = SimpleNamespace(create=create)
    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    with pytest.raises(InterruptedError):
        asyncio.run(anext(soak._over_openai(client, {**prompt_options(prompt), "max_tokens": 1})))  # type: ignore[arg-type]
    assert asked == [prompt.messages]
