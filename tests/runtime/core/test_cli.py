"""What every command line does with an error."""

import contextlib
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from runtime.core.cli import Parser, exit_status, output_problem
from runtime.core.errors import CacheMemoryError, DeviceError, RequestError


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RequestError("top_p: must be above 0"), 2, "name: top_p: must be above 0\n"),
        (RequestError("must be 1", field="num_threads"), 2, "name: --threads: must be 1\n"),
        (DeviceError("cuda:0: this machine has 0 GPUs"), 1, "name: cuda:0: this machine has 0 GPUs\n"),
        (CacheMemoryError("KV cache: the host has no memory"), 1, "name: KV cache: the host has no memory\n"),
        (KeyboardInterrupt(), 130, "name: interrupted\n"),
    ],
)
def test_an_error_is_one_line(
    error: BaseException, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert exit_status("name", command) == status
    assert capsys.readouterr().err == line


def test_sigterm_ends_a_command_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    def command() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)
        return 0

    assert exit_status("name", command, interrupted="nothing was written") == 143
    assert capsys.readouterr().err == "name: nothing was written\n"
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_stays() -> None:
    seen = []

    def command() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(True))
    try:
        assert exit_status("name", command) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen


def test_stdout_is_utf8_whatever_the_locale_says(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert exit_status("name", lambda: print("✓") or 0) == 0
    assert written.getvalue() == "✓\n".encode()


def test_streams_that_the_shell_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    with contextlib.ExitStack() as stack:

        def command() -> int:
            stack.enter_context(sys.stdin)
            stack.enter_context(sys.stdout)
            print("text")
            return len(sys.stdin.read())

        assert exit_status("name", command) == 0


def test_an_empty_path_is_not_the_current_directory(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("build", "export.build_engines", None)
    parser.add_argument("--out", type=Path)
    assert parser.parse_args(["--out", "."]).out == Path()
    with pytest.raises(SystemExit):
        parser.parse_args(["--out", ""])
    assert capsys.readouterr().err.startswith("build: --out: must not be empty")


def test_what_is_wrong_with_a_directory_for_output(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert output_problem(tmp_path / "new" / "head") is None
    assert output_problem(tmp_path) is None
    assert output_problem(tmp_path / "file" / "head") == f"{tmp_path}/file is a file; expected a directory"
    assert output_problem(Path("/sys/head")) == "/sys cannot be written; expected a directory that can"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
