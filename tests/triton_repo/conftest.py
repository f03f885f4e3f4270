"""Servers for all tests that only ask them, since starting and stopping one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import Server
from triton_repo.triton.server import OWN


@pytest.fixture(scope="session")
def server(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All three models."""
    running = Server(tiny_bundle_dir, tmp_path_factory.mktemp("server") / "log", "--plain", "--tokens")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def own_server(tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same without Triton."""
    log = tmp_path_factory.mktemp("own") / "log"
    running = Server(tiny_bundle_dir, log, "--plain", "--tokens", "--server", OWN)
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session", params=["server", "own_server"])
def each_server(request: pytest.FixtureRequest) -> Server:
    """Triton and our own server in turn, which answer alike."""
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def decoder(tiny_bundle_dir: Path) -> SpeculativeDecoder:
    """Plain decoding, whose texts are expected from every server."""
    return SpeculativeDecoder.from_bundle(tiny_bundle_dir, method="plain", num_threads=1)
