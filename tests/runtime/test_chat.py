"""The chat in the terminal: conversations by the template, commands, Ctrl-C, and a real terminal."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from runtime.chat import COMMANDS, Chat, main, read_questions, stopped_by_ctrl_c
from runtime.chat_template import ChatTemplate
from runtime.core.bundle import CHAT_TEMPLATE_NAME, MANIFEST_NAME
from runtime.core.cli import EXIT_TERMINATED, exit_status
from runtime.decode.batch import Batch
from runtime.decode.sequence import Chunk, SequenceState
from runtime.decoder import SpeculativeDecoder
from runtime.engines.kv_cache import SlabKVCache

ROOT = Path(__file__).resolve().parents[2]
NEW_TOKENS = 12
# Without a number of nodes, loading would measure the times of steps.
FIXED = ("--num-nodes", "8", "--threads", "1")

Talk = Callable[..., str]


@pytest.fixture
def talk(tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """What a chat prints when it is given these lines."""

    def run(*lines: str, status: int = 0, more: tuple[str, ...] = (), bundle: Path = tiny_bundle_dir) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        argv = ["--bundle", str(bundle), "--max-new-tokens", str(NEW_TOKENS), *FIXED, *more]
        assert main(argv) == status
        captured = capsys.readouterr()
        return captured.err if status else captured.out

    return run


def answers(output: str) -> list[str]:
    """The texts between a question and its line of counts."""
    found = []
    for part in output.split("\n> ")[1:]:
        _, _, rest = part.partition("\n")
        if "tokens, prompt read in" in rest:
            found.append(rest[: rest.rindex("\n[")])
    return found


def test_answers_continue_the_conversation(tiny_bundle_dir: Path, talk: Talk) -> None:
    """Each is what the decoder says after the whole conversation in the model's template."""
    decoder = SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
    template = ChatTemplate.load(tiny_bundle_dir)
    assert template is not None
    messages: list[dict[str, str]] = []
    for question in ("how many?", "and how few?"):
        messages.append({"role": "user", "content": question})
        ids = decoder.prompt_tokenizer.encode(template.render(messages), raw=True, add_special_tokens=False)
        chunks = decoder.stream(ids, max_new_tokens=NEW_TOKENS)
        messages.append({"role": "assistant", "content": "".join(chunk.text for chunk in chunks)})
    expected = [message["content"] for message in messages[1::2]]
    assert answers(talk("how many?", "", "and how few?")) == expected
    assert answers(talk("how many?", "/plain", "and how few?", "/plain")) == expected
    assert answers(talk("something else", "/reset", "how many?", "and how few?"))[1:] == expected


def test_a_saved_conversation_has_its_system_message(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved.jsonl"
    out = talk(f"/save {path}", "a", "/system be brief", f"/save {path}", "/system", f"/save {path}", "/save")
    assert out.count(f"added to {path}") == 2
    assert "/save: the conversation is empty" in out
    assert "/save: expected the name of a file, got ''" in out
    first, second = map(json.loads, path.read_text().splitlines())
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    assert first["messages"][0]["content"] == "be brief"
    assert second["messages"] == first["messages"][1:]
    assert "/save: /no/dir/x cannot be written: No such file" in talk("a", "/save /no/dir/x")
    monkeypatch.setenv("HOME", str(tmp_path))
    out = talk("a", "/system\tbe brief", "/save ~/second.jsonl", "/save ~nobody.of.this.name/x")
    assert json.loads((tmp_path / "second.jsonl").read_text()) == first
    assert "/save: ~nobody.of.this.name/x cannot be written: Could not determine home directory" in out


def test_the_last_seed(talk: Talk) -> None:
    out = talk("a", "b", more=("--temperature", "1", "--num-nodes", "auto", "--seed", str(2**64 - 1)))
    assert len(answers(out)) == 2


def test_bytes_that_are_no_text(talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused in one line and changes nothing."""
    path = tmp_path / "saved.jsonl"
    bad = b"\xff\n/\xff\n/system \xff\n/save %s\xff\n" % bytes(path)
    monkeypatch.setattr(io, "StringIO", lambda text: io.TextIOWrapper(io.BytesIO(text.encode() + bad)))
    out = talk("a", f"/save {path}\0")
    assert out.count("\ninput: must be valid Unicode, got a lone surrogate at ") == 4
    assert f"/save: expected the name of a file, got {str(path) + chr(0)!r}" in out
    assert not list(tmp_path.iterdir())
    bad += b"/save %s\n" % bytes(path)
    talk("a")
    assert [m["role"] for m in json.loads(path.read_text())["messages"]] == ["user", "assistant"]


def test_sigterm_ends_a_chat_that_waits_for_a_question(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, ended = threading.Event(), threading.Event()

    class Screen(DummyOutput):
        def write(self, data: str) -> None:
            shown.set()

    def terminate() -> None:
        shown.wait(30)
        signal.pthread_kill(main_thread, signal.SIGTERM)
        if not ended.wait(10):
            keys.send_text("\x04")  # leaves a chat that goes on

    main_thread = threading.get_ident()
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    before = signal.getsignal(signal.SIGINT)
    with create_pipe_input() as keys, create_app_session(keys, Screen()):
        thread = threading.Thread(target=terminate)
        thread.start()
        status = exit_status("chat", lambda: len(list(read_questions())))
        ended.set()
        thread.join()
    # asyncio leaves its own handler behind where a signal's exception ends the loop.
    signal.signal(signal.SIGINT, before)
    assert status == EXIT_TERMINATED
    assert capsys.readouterr().err == "chat: interrupted\n"


def test_commands(talk: Talk) -> None:
    out = talk("/help", "/nothing", "/quit", "never read")
    assert all(usage in out for usage in COMMANDS)
    assert "there is no command /nothing; /help lists them" in out
    assert "never read" not in out


def test_a_conversation_longer_than_the_context_keeps_the_chat(talk: Talk) -> None:
    out = talk("word " * 600, "short")
    assert "; /reset begins a new one" in out
    assert len(answers(out)) == 1


def test_a_model_without_a_template(tiny_bundle_dir: Path, tmp_path: Path, talk: Talk) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle_dir, bundle)
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    del manifest["files"][CHAT_TEMPLATE_NAME]
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    line = talk("a", status=2, bundle=bundle)
    assert line == (
        f"chat: --bundle: the model of {bundle} has no chat template, so it does not chat; ctc generate "
        "completes texts\n"
    )


def test_ctrl_c_is_noted_and_a_second_one_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stopped_by_ctrl_c() as is_stopped:
        assert not is_stopped()
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            assert is_stopped()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stopped_answer_keeps_the_chat(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the second step; the answer so far is part of the conversation."""
    real = SpeculativeDecoder.stream

    def stream(self: SpeculativeDecoder, prompt_ids: Any, **options: Any) -> Any:
        for number, chunk in enumerate(real(self, prompt_ids, **options)):
            # Warming up, which no user interrupts here, stops at no token.
            if number == 2 and "stop_token_ids" not in options:
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(SpeculativeDecoder, "stream", stream)
    out = talk("how many?", "/plain", "and how few?")
    assert out.count("; stopped]") == 2
    assert len(answers(out)) == 2


def test_a_question_that_is_stopped_while_it_is_read_is_forgotten(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, twice, during the first chunk of a prompt of several."""
    real = Batch.prefill

    def prefill(self: Batch, sequence: SequenceState, max_tokens: int | None = None) -> Chunk | None:
        if sequence.prompt.size > 50 and not sequence.length:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return real(self, sequence, 50)

    monkeypatch.setattr(Batch, "prefill", prefill)
    path = tmp_path / "saved.jsonl"
    out = talk("word " * 60, "a", f"/save {path}", more=("--prefix-cache-mb", "0"))
    assert out.count("[stopped before the answer began; the question is forgotten]") == 1
    assert json.loads(path.read_text())["messages"][0]["content"] == "a"


def test_without_memory_for_an_answer_the_conversation_stays(
    talk: Talk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for a prompt that is too long nor, further on, for an answer."""
    allocate, run = SlabKVCache._allocate, Chat.run

    def refuse(cache: SlabKVCache, capacity: int) -> NDArray[np.float32]:
        if capacity > 256:
            raise MemoryError
        return allocate(cache, capacity)

    def run_without_memory(self: Chat, questions: Iterator[str]) -> None:
        monkeypatch.setattr(SlabKVCache, "_allocate", refuse)
        run(self, questions)

    monkeypatch.setattr(Chat, "run", run_without_memory)
    path = tmp_path / "saved.jsonl"
    # The first prompt has room, but not the step after it; the second has none.
    out = talk("x" * 222, "x" * 300, "short", f"/save {path}", more=("--prefix-cache-mb", "0"))
    refusal = r"\nKV cache: the host has no memory for \d+ positions of 1 texts\n"
    assert len(re.findall(refusal, out)) == 2
    messages = json.loads(path.read_text())["messages"]
    assert messages[0] == {"role": "user", "content": "short"}
    assert [m["content"] for m in messages[1:]] == answers(out)


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, *argv: str):
        self._fd, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        command = [sys.executable, "-m", "runtime.chat", *argv]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, seconds: float = 120.0) -> None:
        """Wait until ``text`` has been shown after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:  # the other side is closed
                    data = b""
                assert data or text in self.shown, self.shown
                # The editor asks where the cursor is.
                if b"\x1b[6n" in data:
                    os.write(self._fd, b"\x1b[1;1R")
                self.shown += data.decode(errors="replace")
        self.shown = self.shown[self.shown.index(text) + len(text) :]

    def close(self) -> int:
        status = self.process.wait(30)
        os.close(self._fd)
        return status


def test_in_a_terminal(tiny_bundle_dir: Path) -> None:
    """Lines are edited, drafted tokens are green, Ctrl-C keeps the chat, the end of input leaves."""
    terminal = Terminal("--bundle", str(tiny_bundle_dir), "--max-new-tokens", "60", *FIXED)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for(">")
    terminal.type("how mani\x7fy?\r")
    terminal.wait_for("\x1b[32m")
    terminal.wait_for("; cut at its length]")
    terminal.wait_for(">")
    terminal.type("/he\t")
    terminal.wait_for("/help")
    terminal.type("\r")
    terminal.wait_for("leave, as the end of input does")
    terminal.wait_for(">")
    terminal.type("\x03")
    terminal.wait_for("/quit leaves")
    terminal.wait_for(">")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_the_error_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["--bundle", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
