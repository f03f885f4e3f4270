"""The limits of a run with faults. Its clients are those of the tests of the supervisor."""

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load import chaos, clients


def test_what_is_too_late_is_a_problem() -> None:
    kept = chaos.Round("fault", 9.9, 4.9, 16.9)
    went_on = chaos.Round("fault", 9.9, None, None)
    late = chaos.Round("fault", 10.1, 5.1, 17.1)
    for found in (kept, went_on, late):
        chaos._check(found, load_seconds=12.0)
    assert kept.problems == went_on.problems == []
    assert late.problems == [
        "streams have ended after 10.1 s, expected at most 10.0",
        "not ready after 5.1 s, expected at most 5.0",
        "ready again after 17.1 s, expected at most 17.0",
    ]


def test_a_stream_that_ends_without_a_word_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(server: Any) -> Iterator[str]:
        yield "a part"
        raise clients.CutOffError("an interface")

    server: Any = None
    monkeypatch.setattr(clients, "INTERFACES", (cut_off,))
    load = clients.Load(server)
    assert load.reasons() == ["CutOffError: an interface"]
    load.__exit__()
    assert "streams ended without a word" in chaos._cut_off(load)[0]


@pytest.mark.parametrize(
    ("reason", "end", "error"),
    [
        ("length", b"0\r\n\r\n", None),
        ("", b"0\r\n\r\n", clients.CutOffError),
        ("", b"", http.client.IncompleteRead),
    ],
)
def test_an_answer_that_is_cut_off_is_told_from_one_without_a_reason(
    reason: str, end: bytes, error: type[Exception] | None
) -> None:
    """Where the server is killed, its system closes the connection, which tells the client enough."""
    line = f'data: {{"text_output": "a", "finish_reason": "{reason}"}}\n\n'.encode()

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            while b"max_tokens" not in connection.recv(4096):
                pass
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for part in (line[:9], line[9:]):
                connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            connection.sendall(end)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answer)
        thread.start()
        server: Any = SimpleNamespace(http_port=listening.getsockname()[1])
        with pytest.raises(error) if error else nullcontext():
            assert list(clients.over_http(server)) == ["a"]
        thread.join()


def test_a_directory_without_a_bundle_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no engine bundle" in line
