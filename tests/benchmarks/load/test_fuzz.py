"""Random requests: the server stands them, the tool notices when it does not."""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load import fuzz, fuzz_openai


@pytest.fixture
def argv(tiny_bundle_dir: Path, tmp_path: Path) -> list[str]:
    return ["--bundle", str(tiny_bundle_dir), "--threads", "1", "--out", str(tmp_path / "out")]


def test_random_requests_leave_the_server_healthy(
    shared_server: None, argv: list[str], tmp_path: Path
) -> None:
    assert fuzz.main([*argv, "--requests", "200"]) == 0
    report = json.loads((tmp_path / "out" / "fuzz.json").read_text())
    counts = report["counts"]
    assert sum(counts.values()) == 200
    assert counts["served"] > 50
    assert counts["refused"] > 50
    assert set(counts) <= {"served", "refused", "left"}
    assert report["healthy"]
    assert report["server_exit_status"] == 0


def test_random_requests_over_openai_s_interface(
    shared_server: None, argv: list[str], tmp_path: Path
) -> None:
    assert fuzz_openai.main([*argv, "--requests", "150"]) == 0
    counts = json.loads((tmp_path / "out" / "fuzz_openai.json").read_text())["counts"]
    assert sum(counts.values()) == 150
    assert min(counts["served"], counts["refused"]) > 30
    assert set(counts) <= {"served", "refused", "left"}


@pytest.mark.parametrize(
    ("content_type", "text", "expected"),
    [
        ("application/json", '{"choices": []}', True),
        ("application/json", "[]", False),
        ("text/event-stream", 'data: {"choices": []}\n\ndata: [DONE]\n\n', True),
        ("text/event-stream", 'data: {"choices": []}\n\n', False),
        ("text/event-stream", 'data: {"type": "response.completed"}\n\n', True),
        ("text/event-stream", "data: [3]\n\n", False),
        ("text/event-stream", "data: {\n\ndata: [DONE]\n\n", False),
    ],
)
def test_what_a_whole_answer_is(content_type: str, text: str, expected: bool) -> None:
    assert fuzz_openai._is_whole(content_type, text.encode()) == expected


class Answer:
    """Of aiohttp, with this body."""

    status, content_type = 200, "application/json"

    def __init__(self, body: bytes):
        self._body = body

    async def __aenter__(self) -> "Answer":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def read(self) -> bytes:
        return self._body

    async def json(self) -> Any:
        return json.loads(self._body.decode())


@pytest.mark.parametrize("body", [b"<html>", b'{"a": "\xff"}', b"[" * 100_000, b'{"choices": []}'])
def test_an_answer_that_cannot_be_read_ends_nothing(body: bytes) -> None:
    def send(*request: object, **options: object) -> Answer:
        return Answer(body)

    session: Any = SimpleNamespace(request=send, post=send)
    outcome, _ = asyncio.run(fuzz_openai.ask(session, random.Random(0)))
    assert outcome == ("served" if body.startswith(b'{"c') else "misshaped")
    assert "Error" in asyncio.run(fuzz_openai.reference(session))


@pytest.mark.parametrize("outcome", ["lost", "unclear", "broken"])
def test_what_must_not_happen(outcome: str) -> None:
    assert fuzz.passed({"served": 3, "refused": 2, "left": 1}, True, 0)
    assert not fuzz.passed({"served": 3, outcome: 1}, True, 0)
    assert not fuzz.passed({"served": 3}, False, 0)
    assert not fuzz.passed({"served": 3}, True, 1)


def test_a_changed_answer_is_noticed(
    shared_server: None, argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(range(100))

    async def reference(url: str) -> str:
        return f"answer {next(answers)}"

    monkeypatch.setattr(fuzz, "reference", reference)
    assert fuzz.main([*argv, "--requests", "2"]) == 1


def test_a_number_gives_the_same_request() -> None:
    for make in (fuzz.make_request, fuzz_openai.make_request):
        first, second, other = (make(random.Random(seed)) for seed in ("0 1", "0 1", "0 2"))
        assert first == second
        assert first != other


def test_bad_input_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main([*argv, "--requests", "0"]) == 2
    assert fuzz.main([*argv, "--bundle", "absent"]) == 2
    captured = capsys.readouterr().err.splitlines()
    assert captured[0].startswith("fuzz: --requests: must be a whole number of at least 1")
    assert "absent is no engine bundle" in captured[1]
