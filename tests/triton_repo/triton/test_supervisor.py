"""Model processes that die or hang under load: streams end with a reason, and the server serves again."""

import asyncio
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from benchmarks.load.clients import Load, model_process, readiness, status_of, wait_for_readiness
from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import (
    GENERATE,
    PATIENCE,
    RESTARTED,
    KeptServer,
    Server,
    assert_nothing_is_left_by,
    expected_text,
)
from triton_repo.triton.health import Health
from triton_repo.triton.server import OWN, TRITON
from triton_repo.triton.supervisor import Supervisor
from triton_repo.triton.tensors import MODEL


@pytest.fixture(scope="module")
def kept_server(
    request: pytest.FixtureRequest, tiny_bundle_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KeptServer]:
    """The tests name it: Triton, or ours."""

    def start() -> Server:
        directory = tmp_path_factory.mktemp("supervised")
        bundle = Path(shutil.copytree(tiny_bundle_dir, directory / "bundle"))
        return Server(bundle, directory / "log", "--server", request.param)

    kept = KeptServer(start)
    yield kept
    kept.stop()


@pytest.fixture
def supervised(kept_server: KeptServer) -> Server:
    """A server with a bundle of its own."""
    return kept_server.running()


@pytest.mark.parametrize(
    ("kept_server", "number"),
    [(TRITON, signal.SIGKILL), (TRITON, signal.SIGSTOP), (TRITON, signal.SIGBUS), (OWN, signal.SIGKILL)],
    indirect=["kept_server"],
)
def test_a_model_process_that_dies_or_hangs(
    supervised: Server, decoder: SpeculativeDecoder, number: signal.Signals
) -> None:
    """SIGBUS comes from the bundle itself: a file is emptied from which the process reads its weights."""
    process, restarts = model_process(supervised), supervised.log.read_text().count(RESTARTED)
    assert readiness(supervised) == {True}
    weights = supervised.log.parent / "bundle" / "backbone.onnx.data"
    content = weights.read_bytes()
    with Load(supervised) as load:
        # Until its weights are back, no new process can load them.
        if number != signal.SIGBUS:
            weights.unlink()
        weights.write_bytes(b"")
        if number != signal.SIGBUS:
            process.send_signal(number)
        wait_for_readiness(supervised, False)
        assert status_of(f"http://localhost:{supervised.http_port}/v2/health/live") == 200
        texts = load.reasons()
    assert load.num_cut_off == 0
    assert "UNAVAILABLE" in texts[0]
    happened = "hangs: no heartbeat for" if number == signal.SIGSTOP else "has ended"
    for text in texts[1:]:
        assert f"the process {process.pid} of {MODEL} {happened}" in text
    for fetch, body in (
        (supervised.fetch, b'{"text_input": "x"}'),
        (lambda path, body: ask_openai(supervised, body), b'{"model": "ctc_llm", "prompt": "x"}'),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            fetch(GENERATE, body)
        assert (caught.value.code, caught.value.headers["Retry-After"]) == (503, "2")
    supervised.wait_for("backbone.onnx.data must have", restarts + 1)
    weights.write_bytes(content)
    supervised.wait_for(RESTARTED, restarts + 1)
    assert readiness(supervised) == {True}
    assert model_process(supervised).pid != process.pid
    assert supervised.text(text_input="x") == expected_text(decoder, "x")


def ask_openai(server: Server, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://localhost:{server.openai_port}/v1/completions", body)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize("kept_server", [TRITON], indirect=True)
def test_a_tritonserver_that_hangs(supervised: Server, decoder: SpeculativeDecoder) -> None:
    restarts = supervised.log.read_text().count(RESTARTED)
    with Load(supervised) as load:
        process = model_process(supervised).parent()
        assert process is not None
        process.suspend()
        wait_for_readiness(supervised, False)
        assert all(load.reasons())
    supervised.wait_for(RESTARTED, restarts + 1)
    assert "serve: tritonserver does not answer: " in supervised.log.read_text()
    assert supervised.text(text_input="x") == expected_text(decoder, "x")


@pytest.mark.parametrize("kept_server", [TRITON, OWN], indirect=True)
def test_sigkill_of_the_launcher_leaves_nothing(supervised: Server) -> None:
    """Its clients hear of it at once."""
    with Load(supervised) as load:
        assert_nothing_is_left_by(supervised, supervised.process.kill)
        assert all(load.reasons())


def test_a_server_that_does_not_say_what_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All models that were asked for have failed, and whether there are others cannot be found out."""

    async def load(self: Supervisor) -> dict[str, str]:
        return {MODEL: "its bundle is damaged"}

    async def index(**options: Any) -> Any:
        raise InferenceServerException("the connection was refused")

    async def start() -> str | None:
        client: Any = SimpleNamespace(get_model_repository_index=index)
        return await Supervisor([], {}, tmp_path, [MODEL], client, Health(), "ready")._start_first()

    monkeypatch.setattr(Supervisor, "_load", load)
    assert asyncio.run(start()) == "no model can be served, so the server ends"
