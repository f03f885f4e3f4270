"""Distilling through a served model, against a real HTTP server that speaks OpenAI's protocol."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

from tests.training.data_files import read_examples
from training import distill, train
from training.data.conversations import read_turns
from training.settings import TrainingError

ROOT = Path(distill.__file__).parents[1]
MODEL = "tiny"
EOS = "<|endoftext|>"


class Server:
    """What it was asked, and how it answers: ``behave`` may return a status and a body instead.

    The answer to a prompt is the prompt's last line backwards.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.most_at_once = 0
        self.reason = "stop"
        self.behave: Callable[[dict[str, Any]], tuple[int, Any] | None] = lambda body: None
        self._now = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = server.answer(self.path, body, self.headers["Authorization"])
                self._send(status, reply)

            def _send(self, status: int, reply: Any) -> None:
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *args: Any) -> None:
                pass  # a client that was interrupted hangs up

        self.http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def answer(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        with self._lock:
            self.asked.append(body)
            self.keys.add(key)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            special = self.behave(body)
        finally:
            with self._lock:
                self._now -= 1
        if special is not None:
            return special
        if body["model"] != MODEL:
            message = f"The model `{body['model']}` does not exist."
            return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason}
        if path == "/v1/chat/completions":
            choice["message"] = {"role": "assistant", "content": body["messages"][-1]["content"][::-1]}
        else:
            assert path == "/v1/completions"
            choice["text"] = " " + body["prompt"][::-1]
        return 200, {"id": "x", "object": "y", "created": 0, "model": MODEL, "choices": [choice]}

    def times_asked(self) -> Counter[str]:
        return Counter(json.dumps(body.get("messages", body.get("prompt"))) for body in self.asked)


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, count: int) -> Path:
    return write(path, *({"question": f"number {i}", "answer": "unused"} for i in range(count)))


def arguments(server: Server, data: Path, out: Path, *more: str) -> list[str]:
    base = ["--base-url", server.url, "--model", MODEL, "--data", str(data), "--out", str(out)]
    return [*base, *more]


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def prompts(out: Path) -> set[str]:
    return {row["messages"][-2]["content"] for row in rows(out)}


def texts(data: Path, tokenizer: Any) -> list[tuple[str, str | None]]:
    """Prompts and answers as training reads them."""
    return [
        (tokenizer.decode(e.prompt_ids), None if e.answer_ids is None else tokenizer.decode(e.answer_ids))
        for e in read_examples(data, tokenizer)
    ]


def error_line(capsys: Any) -> str:
    """The one line of an error; the progress bar redraws itself with carriage returns."""
    lines = [part for part in re.split("[\r\n]+", capsys.readouterr().err) if part.startswith("distill:")]
    (line,) = lines
    return str(line)


def test_every_format_gives_its_prompts(server: Server, tmp_path: Path) -> None:
    human, gpt = {"from": "human", "value": "one"}, {"from": "gpt", "value": "eno?"}
    data = write(
        tmp_path / "data.jsonl",
        {"conversations": [human, gpt, {"from": "human", "value": "two"}]},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "three"}]},
        {"prompt": "four", "completion": "unused"},
        {"question": "five", "answer": "unused"},
        {"turns": ["six", "not asked: it needs the answer to the first"]},
        {"question": "five", "answer": "the same prompt again"},
    )
    out = tmp_path / "sub" / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--max-new-tokens", "7")) == 0
    found = {row["messages"][-2]["content"]: row for row in rows(out)}
    assert found.keys() == {"one", "two", "three", "four", "five", "six"}
    assert all(row["messages"][-1]["content"] == prompt[::-1] for prompt, row in found.items())
    assert found["two"]["messages"][:2] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "eno?", "weight": 0},
    ]
    assert found["three"]["messages"][0] == {"role": "system", "content": "be"}
    assert len({row["id"] for row in found.values()}) == len(server.asked) == 6
    for body in server.asked:
        assert (body["model"], body["max_tokens"], body["temperature"]) == (MODEL, 7, 0)
        assert all(message.keys() == {"role", "content"} for message in body["messages"])


def test_training_sees_the_answers_and_nothing_else(server: Server, tmp_path: Path, tokenizer: Any) -> None:
    turns = [("human", "ab"), ("gpt", "not the model's"), ("human", "cd")]
    data = write(tmp_path / "data.jsonl", {"conversations": [{"from": f, "value": v} for f, v in turns]})
    out = tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--concurrency", "1")) == 0
    found = texts(out, tokenizer)
    history = f"Q: ab\nA: not the model's{EOS}\nQ: cd\nA:"
    assert found == [("Q: ab\nA:", f" ba{EOS}\n"), (history, f" dc{EOS}\n")]


def test_an_answer_cut_at_its_length_has_no_end(server: Server, tmp_path: Path, tokenizer: Any) -> None:
    server.reason = "length"
    out = tmp_path / "out.jsonl"
    assert distill.main(arguments(server, questions(tmp_path / "data.jsonl", 1), out)) == 0
    assert texts(out, tokenizer) == [("Q: number 0\nA:", " 0 rebmun")]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_raw_continuations(server: Server, tmp_path: Path, tokenizer: Any, reason: str) -> None:
    """The chat template, which this tokenizer has, stays out of it; only a finished text has an end."""
    server.reason = reason
    messages = [{"role": r, "content": c} for r, c in (("user", "x"), ("assistant", "y"), ("user", "z"))]
    data = write(
        tmp_path / "data.jsonl",
        {"text": "three words are the prompt, but not all of these"},
        {"text": "abcdefghij"},
        {"messages": messages},
        {"prompt": "as it is", "completion": " unused", "raw": True},
        {"prompt": ""},
    )
    out = tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--completions", "--concurrency", "1")) == 0
    expected = ["three words", "abc", "x", "x\ny\nz", "as it is"]
    assert [row["prompt"] for row in rows(out)] == expected
    end = EOS if reason == "stop" else ""
    assert texts(out, tokenizer) == [(prompt, f" {prompt[::-1]}{end}") for prompt in expected]


def test_the_reader_knows_what_answers_are_marked_with(tmp_path: Path, tokenizer: Any) -> None:
    """Also where others wrote the marks: a cut answer before the last turn, raw text without an answer."""
    user, cut = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    data = write(
        tmp_path / "data.jsonl",
        {"messages": [user, cut, user, cut], "finish_reason": "length"},
        {"messages": [user, cut | {"weight": 0}, user, cut | {"weight": 1}]},
        {"messages": [user, cut | {"weight": 0}, user]},
        {"prompt": "p", "completion": "c", "finish_reason": "length"},
        {"prompt": [user], "completion": [cut], "finish_reason": "content_filter"},
        {"instruction": "p", "output": "c", "finish_reason": "tool_calls"},
        {"prompt": "p", "completion": "c", "raw": False},
        {"prompt": "p", "completion": "c", "raw": True},
        {"prompt": "p", "raw": True, "finish_reason": "stop"},
    )
    end, two = f"{EOS}\n", f"Q: u\nA: a{EOS}\nQ: u\nA:"
    assert texts(data, tokenizer) == [
        ("Q: u\nA:", f" a{end}"),
        (two, " a"),
        (two, f" a{end}"),
        (two, None),
        ("Q: p\nA:", " c"),
        ("Q: u\nA:", " a"),
        ("Q: p\nA:", " c"),
        ("Q: p\nA:", f" c{end}"),
        ("p", "c"),
        ("p", None),
    ]
    surrogate = write(tmp_path / "surrogate.jsonl", {"prompt": "fine"}, {"prompt": "a\ud800"})
    with pytest.raises(
        TrainingError, match=r"surrogate\.jsonl:2: field 'prompt': holds a lone surrogate at 1"
    ):
        read_turns(surrogate)


def test_plain_text_is_no_chat(server: Server, tmp_path: Path, capsys: Any) -> None:
    data = write(tmp_path / "data.jsonl", {"prompt": "hi"}, {"text": "a plain text"})
    assert distill.main(arguments(server, data, tmp_path / "out.jsonl")) == 2
    assert "add --completions" in error_line(capsys)
    assert not server.asked


def test_requests_run_at_the_same_time(server: Server, tmp_path: Path) -> None:
    everyone = threading.Barrier(8)

    def together(body: dict[str, Any]) -> None:
        everyone.wait(timeout=60)  # opens only when eight requests are there at once

    server.behave = together
    data, out = questions(tmp_path / "data.jsonl", 16), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--concurrency", "8")) == 0
    assert server.most_at_once == 8
    assert len(rows(out)) == len(server.asked) == 16


def test_interrupted_run_continues_where_it_was(server: Server, tmp_path: Path, capsys: Any) -> None:
    """Ctrl-C while four requests hang: ten answers are there, and no one asks for them again."""
    data, out, whole = (
        questions(tmp_path / "data.jsonl", 24),
        tmp_path / "out.jsonl",
        tmp_path / "whole.jsonl",
    )
    hang, hanging = threading.Event(), threading.Semaphore(0)

    def hang_after_ten(body: dict[str, Any]) -> None:
        if len(server.asked) > 10:
            hanging.release()
            hang.wait(timeout=60)

    server.behave = hang_after_ten
    argv = arguments(server, data, out, "--concurrency", "4")
    process = subprocess.Popen(
        [sys.executable, "-m", "training.distill", *argv],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for _ in range(4):
        assert hanging.acquire(timeout=60)
    # Answers are on disk while others are awaited; the last of the ten may still be on its way.
    deadline = time.monotonic() + 60
    while len(lines := out.read_bytes().splitlines()) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(lines) == 10
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    hang.set()
    assert process.returncode == 130, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    first = rows(out)
    assert len(first) == 10

    server.behave = lambda body: None
    asked_before = server.times_asked()
    assert distill.main(argv) == 0
    repeated = [prompt for prompt, times in server.times_asked().items() if times > 1]
    assert len(repeated) == 4  # those that hung
    assert sum((server.times_asked() - asked_before).values()) == 14
    assert rows(out)[:10] == first
    assert distill.main(arguments(server, data, whole)) == 0
    assert sorted(rows(out), key=str) == sorted(rows(whole), key=str)

    asked = len(server.asked)
    assert distill.main(argv) == 0
    assert len(server.asked) == asked


@pytest.mark.parametrize("keep", [-1, -40, 3], ids=["newline", "half", "opening"])
def test_half_written_line_is_asked_again(server: Server, tmp_path: Path, keep: int) -> None:
    data, out = questions(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out)) == 0
    *before, last = out.read_bytes().splitlines(keepends=True)
    expected = rows(out)
    out.write_bytes(b"".join(before) + last[:keep])
    assert distill.main(arguments(server, data, out)) == 0
    assert rows(out) == expected
    assert len(server.asked) == 4


def test_half_a_line_behind_all_answers_goes(server: Server, tmp_path: Path) -> None:
    data, out = questions(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out)) == 0
    expected = out.read_bytes()
    out.write_bytes(expected + b'{"id": "72')
    assert distill.main(arguments(server, data, out)) == 0
    assert out.read_bytes() == expected


def test_larger_sample_asks_only_for_the_rest(server: Server, tmp_path: Path) -> None:
    data, out = questions(tmp_path / "data.jsonl", 20), tmp_path / "out.jsonl"
    for count, asked in ((5, 5), (12, 12), (100, 20)):
        assert distill.main(arguments(server, data, out, "--max-samples", str(count))) == 0
        assert len(server.asked) == len(rows(out)) == asked


def test_extra_body_and_key_are_sent(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = questions(tmp_path / "data.jsonl", 1)
    assert distill.main(arguments(server, data, tmp_path / "out.jsonl")) == 0
    monkeypatch.setenv("SOME_KEY", "secret")
    more = ["--extra-body", '{"repetition_penalty": 1.0}', "--api-key-env", "SOME_KEY"]
    assert distill.main(arguments(server, data, tmp_path / "other.jsonl", *more)) == 0
    assert [body.get("repetition_penalty") for body in server.asked] == [None, 1.0]
    assert server.keys == {"Bearer none", "Bearer secret"}


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_failure_that_passes_is_tried_again(server: Server, tmp_path: Path, status: int) -> None:
    def once(body: dict[str, Any]) -> tuple[int, Any] | None:
        return (status, {"error": {"message": "busy"}}) if len(server.asked) == 1 else None

    server.behave = once
    out = tmp_path / "out.jsonl"
    assert distill.main(arguments(server, questions(tmp_path / "data.jsonl", 3), out)) == 0
    assert len(rows(out)) == 3
    assert len(server.asked) == 4


UNUSABLE = "the server's answer cannot be used: "


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, {"error": {"message": "out of\nmemory"}}), "the server says 500: out of memory"),
        ((400, {"object": "error", "message": "too long"}), "the server says 400: too long"),
        ((200, {"choices": []}), UNUSABLE + "it is no completion"),
        ((200, [1]), UNUSABLE),
        ((200, b"{"), UNUSABLE),
        ((200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}), "it holds no text"),
        ((200, {"choices": [{"message": {"content": "\ud800"}, "finish_reason": "stop"}]}), "surrogates"),
        (
            (200, {"choices": [{"message": {"content": "a", "reasoning_content": "b"}}]}),
            "its thoughts are apart from its text: start the server without a reasoning parser",
        ),
    ],
)
def test_a_prompt_that_keeps_failing_is_counted_and_the_others_kept(
    server: Server, tmp_path: Path, capsys: Any, reply: tuple[int, Any], message: str
) -> None:
    server.behave = lambda body: reply if body["messages"][-1]["content"] == "number 3" else None
    data, out = questions(tmp_path / "data.jsonl", 6), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--max-retries", "0")) == 1
    line = error_line(capsys)
    assert "1 of 6 prompts failed" in line
    assert message in line
    assert prompts(out) == {f"number {i}" for i in (0, 1, 2, 4, 5)}
    server.behave = lambda body: None
    assert distill.main(arguments(server, data, out)) == 0
    assert len(rows(out)) == 6
    assert len(server.asked) == 7


def test_an_answer_that_takes_too_long_has_failed(server: Server, tmp_path: Path, capsys: Any) -> None:
    ended = threading.Event()

    def sleep(body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] == "number 1":
            ended.wait(timeout=30)

    server.behave = sleep
    argv = arguments(server, questions(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl")
    assert distill.main([*argv, "--timeout", "1", "--max-retries", "1"]) == 1
    ended.set()
    assert "1 of 3 prompts failed, the first because no answer within 1 s (--timeout)" in error_line(capsys)
    assert len(server.asked) == 4


def test_no_answer_at_all_leaves_no_file(server: Server, tmp_path: Path, capsys: Any) -> None:
    server.behave = lambda body: (400, {"error": {"message": "too long"}})
    data, out = questions(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out, "--max-retries", "0")) == 1
    said = capsys.readouterr()
    assert "3 of 3 prompts failed" in said.err
    assert f"{out} is not written: 0 of 3 prompts answered" in said.out
    assert not out.exists()


@pytest.mark.parametrize("status", [500, 400])
def test_a_server_that_answers_nothing_is_given_up(
    server: Server, tmp_path: Path, capsys: Any, status: int
) -> None:
    server.behave = lambda body: (status, {"error": {"message": "no chat template"}})
    argv = arguments(server, questions(tmp_path / "data.jsonl", 100), tmp_path / "out.jsonl")
    assert distill.main([*argv, "--concurrency", "4", "--max-retries", "0"]) == 2
    assert "20 prompts in a row failed" in error_line(capsys)
    assert len(server.asked) < 30


def test_many_prompts_may_be_too_long_where_some_are_answered(
    server: Server, tmp_path: Path, capsys: Any
) -> None:
    data, out = questions(tmp_path / "data.jsonl", 60), tmp_path / "out.jsonl"
    server.behave = lambda body: (
        None if body["messages"][-1]["content"] == "number 0" else (400, {"message": "long"})
    )
    assert distill.main(arguments(server, data, out, "--concurrency", "1")) == 1
    assert "59 of 60 prompts failed" in error_line(capsys)
    assert len(server.asked) == 60


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "other"], "the server says 404: The model `other` does not exist."),
        (["--base-url", "http://127.0.0.1:1/v1"], "--base-url: http://127.0.0.1:1/v1 cannot be reached: "),
        (["--base-url", "localhost/v1"], "--base-url: expected an address such as http://localhost:8000/v1"),
        (["--base-url", "http://localhost:8000v1"], "--base-url: expected an address such as http://local"),
        (["--api-key-env", "LONG_DASH"], "--api-key-env: LONG_DASH holds characters that no API key has"),
        (["--seed", "-1"], "--seed: must be between 0 and 4294967295, got -1"),
        (
            ["--out", "x.jsonl.gz"],
            "--out: expected a file of plain JSON lines, such as answers.jsonl, got 'x",
        ),
        (["--concurrency", "0"], "--concurrency: must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens: must be at least 1, got 0"),
        (["--max-samples", "0"], "--max-samples: must be at least 1, got 0"),
        (["--max-retries", "-1"], "--max-retries: must be at least 0, got -1"),
        (["--timeout", "nan"], "--timeout: must be more than 0, got nan"),
        (["--api-key-env", "NO_SUCH_KEY"], "--api-key-env: NO_SUCH_KEY is not set"),
        (["--extra-body", "[]"], "--extra-body: expected a JSON object, got '[]'"),
        (["--extra-body", "[" * 100_000], "--extra-body: expected a JSON object, got '[[["),
        (["--extra-body", "1" * 5001], "--extra-body: expected a JSON object, got '111"),
        (["--data", "missing.jsonl"], "--data: missing.jsonl does not exist"),
        (["--out", "."], "--out: . is no file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2_at_once(
    server: Server,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    def retry(self: Any, **options: Any) -> None:
        raise AssertionError("a mistake is tried again")

    for client in ("SyncAPIClient", "AsyncAPIClient"):
        monkeypatch.setattr(f"openai._base_client.{client}._sleep_for_retry", retry)
    monkeypatch.setenv("LONG_DASH", "sk\u2014x")
    argv = arguments(server, questions(tmp_path / "data.jsonl", 40), tmp_path / "out.jsonl")
    assert distill.main([*argv, *flags]) == 2
    assert message in error_line(capsys)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_field_for_a_server_is_refused_without_one(tmp_path: Path, capsys: Any) -> None:
    data = questions(tmp_path / "data.jsonl", 2)
    argv = ["--model", "absent", "--data", str(data), "--out", str(tmp_path / "out.jsonl")]
    assert distill.main([*argv, "--extra-body", '{"chat_template_kwargs": {}}']) == 2
    assert "--extra-body: is for the requests to a server, got no --base-url" in error_line(capsys)


def test_data_is_never_taken_for_answers(server: Server, tmp_path: Path, capsys: Any) -> None:
    """An --out with something else in it stays as it is, down to its last byte."""
    data = questions(tmp_path / "data.jsonl", 2)
    assert distill.main(arguments(server, data, data)) == 2
    assert "is one of the files of --data" in error_line(capsys)
    for content in ('{"prompt": "hi"}\n', '{"prompt": "hi"', "notes", '{"id": "x", "prompt": "hi"}\n', "\n"):
        other = tmp_path / "other.jsonl"
        other.write_text(content)
        assert distill.main(arguments(server, data, other)) == 2
        assert f"{other}:1: expected a record of an earlier run" in error_line(capsys)
        assert other.read_text() == content
    assert not server.asked


def test_a_second_run_asks_nothing_while_the_first_one_writes(
    server: Server, tmp_path: Path, capsys: Any
) -> None:
    data, out = questions(tmp_path / "data.jsonl", 3), tmp_path / "out.jsonl"
    asked, may_answer = threading.Semaphore(0), threading.Event()

    def behave(body: dict[str, Any]) -> None:
        asked.release()
        assert may_answer.wait(30)

    server.behave = behave
    command = [sys.executable, "-m", "training.distill", *arguments(server, data, out)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as first:
        for _ in range(3):
            assert asked.acquire(timeout=60)
        assert distill.main(arguments(server, data, out)) == 2
        assert f"--out: {out}: another run writes to this file" in error_line(capsys)
        may_answer.set()
        assert first.wait(60) == 0
    assert len(server.asked) == len(rows(out)) == 3
    assert distill.main(arguments(server, data, out)) == 0


def test_answers_to_other_requests_are_refused(server: Server, tmp_path: Path, capsys: Any) -> None:
    data, out = questions(tmp_path / "data.jsonl", 2), tmp_path / "out.jsonl"
    assert distill.main(arguments(server, data, out)) == 0
    capsys.readouterr()
    assert distill.main(arguments(server, data, out, "--model", "other")) == 2
    assert f"{out}:1: was written with other settings (model: 'tiny', not 'other'); remove" in error_line(
        capsys
    )
    assert distill.main(arguments(server, data, out, "--max-new-tokens", "9")) == 2
    assert "(max_new_tokens: 512, not 9)" in error_line(capsys)
    assert distill.main(arguments(server, data, out, "--extra-body", '{"seed": 1}')) == 2
    assert "(extra_body: {}, not {'seed': 1})" in error_line(capsys)
    assert len(rows(out)) == len(server.asked) == 2


def test_without_the_client_there_is_one_line(tmp_path: Path) -> None:
    code = "import sys; sys.modules['openai'] = None; from training import distill as o; "
    code += "exit(o.main(sys.argv[1:]))"
    data, out = questions(tmp_path / "data.jsonl", 1), tmp_path / "out.jsonl"
    given = ["--base-url", "http://localhost:1/v1", "--model", "m", "--data", str(data), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, *given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("distill: the package openai is missing")
    assert done.stderr.count("\n") == 1


def test_training_runs_on_the_answers(server: Server, tmp_path: Path, tiny_model_dir: Path) -> None:
    out, head = tmp_path / "out.jsonl", tmp_path / "head"
    assert distill.main(arguments(server, questions(tmp_path / "data.jsonl", 12), out)) == 0
    settings = {
        "model": tiny_model_dir, "data": out, "out": head, "labels": "data", "precision": "fp32",
        "num-frames": 4, "num-labels": 3, "steps": 2, "warmup": 1, "batch-size": 2, "num-anchors": 4,
        "holdout": 0.2,
    }  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    assert train.main([part for name, value in settings.items() for part in (f"--{name}", str(value))]) == 0
    AcceleratorState._reset_state(reset_partial_state=True)
    assert json.loads((head / "training.json").read_text())["num_sequences"] == 12


def test_a_served_model_writes_its_own_prompts(
    server: Server, tmp_path: Path, tiny_model_dir: Path, capsys: Any
) -> None:
    """As a user by raw completions, then answered as a chat; a second run asks for nothing."""
    names = ["Amazon", "Danube", "Ganges", "Mekong", "Niger", "Oder", "Paraná", "Rhine", "Seine", "Thames"]

    def behave(body: dict[str, Any]) -> tuple[int, Any] | None:
        if "prompt" not in body:
            return None
        assert body["prompt"] == "Q: "
        assert (body["stop"], body["temperature"], body["top_p"]) == (["A:"], 0.7, 0.9)
        text = f" Where does the {names[body['seed'] % len(names)]} end?\n"
        choice = {"index": 0, "finish_reason": "stop", "text": text}
        return 200, {"id": "x", "object": "y", "created": 0, "model": MODEL, "choices": [choice]}

    server.behave = behave
    out = tmp_path / "out.jsonl"
    argv = ["--base-url", server.url, "--model", MODEL, "--out", str(out), "--self-prompts", "7"]
    argv += ["--chat-template", str(tiny_model_dir), "--prompt-temperature", "0.7", "--prompt-top-p", "0.9"]
    assert distill.main(argv) == 0
    written = [f"Where does the {name} end?" for name in names]
    assert len(prompts(out)) == 7
    assert prompts(out) <= set(written)
    assert "prompts that the model wrote as a user are kept" in capsys.readouterr().out
    count = len(server.asked)
    assert distill.main(argv) == 0
    assert len(server.asked) == count


def test_a_server_without_raw_completions(
    server: Server, tmp_path: Path, tiny_model_dir: Path, capsys: Any
) -> None:
    server.behave = lambda body: (404, {"error": {"message": "no such route"}}) if "prompt" in body else None
    out = tmp_path / "out.jsonl"
    argv = ["--base-url", server.url, "--model", MODEL, "--out", str(out), "--self-prompts", "7"]
    assert distill.main([*argv, "--chat-template", str(tiny_model_dir)]) == 2
    assert "no raw completion, which --self-prompts needs" in error_line(capsys)
    server.behave = lambda body: (200, {"choices": []})
    assert distill.main([*argv, "--chat-template", str(tiny_model_dir)]) == 2
    assert "no raw completion, which --self-prompts needs: it is no completion" in error_line(capsys)
    down = ["--base-url", "http://127.0.0.1:1/v1", "--max-retries", "0"]
    assert distill.main([*argv, "--chat-template", str(tiny_model_dir), *down]) == 2
    assert "--base-url: http://127.0.0.1:1/v1 cannot be reached: " in error_line(capsys)


def test_the_old_name_is_the_same_command() -> None:
    from training import openai_distill

    assert openai_distill.main is distill.main
