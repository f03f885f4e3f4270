"""One server for all tests of the load tools."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.load import clients, fuzz, fuzz_openai, serving, soak
from triton_repo.serve import parse_args
from triton_repo.triton.process import ServerProcess

# Users at a time, each of whom has a slot of the server: one that is not given back is noticed.
USERS = 8


@pytest.fixture(scope="session")
def server(tiny_bundle_dir: Path) -> Iterator[ServerProcess]:
    options = ["--plain", "--tokens", "--max-num-seqs", str(USERS), "--num-nodes", "4"]
    with clients.running_server(tiny_bundle_dir, 1, *options) as found:
        yield found
    assert found.process.returncode == 0


@pytest.fixture
def shared_server(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools ask this server in place of one of their own, whose options are still checked."""

    @contextmanager
    def running_server(bundle: Path, threads: int | None, *options: str) -> Iterator[Any]:
        _, unknown = parse_args(["--bundle", str(bundle), "--threads", str(threads), *options])
        assert not unknown
        # The exit status is checked when the server ends, after all tests.
        process = SimpleNamespace(pid=server.process.pid, returncode=0)
        yield SimpleNamespace(url=server.url, openai_port=server.openai_port, log=server.log, process=process)

    for tool in (fuzz, fuzz_openai, serving, soak):
        monkeypatch.setattr(tool, "running_server", running_server)
    monkeypatch.setattr(fuzz, "STREAMS", USERS)
    monkeypatch.setattr(fuzz_openai, "STREAMS", USERS)
