"""Steps as graphs on a real server: the same texts, and what happens when a device fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from runtime.decoder import SpeculativeDecoder
from tests.triton_repo.servers import PROMPTS, RESTARTED, Server, expected_text
from triton_repo.triton.server import write_repository
from triton_repo.triton.tensors import MODEL, TOKENS_MODEL

# Its device fails once, at a step, as a GPU's driver would report it.
FAILING_MODEL = """
from pathlib import Path
from typing import Any

from runtime.device.step import GraphStep
from runtime.core.errors import DeviceError
from triton_repo.triton import backend

MARKER = Path(__file__).with_name("failed")


class TritonPythonModel(backend.TritonPythonModel):
    def execute(self, requests):
        runner = self._model.decoder.batch.runner
        assert isinstance(runner, GraphStep)
        if not MARKER.exists():

            def fail(sequences, num_nodes, num_verified=None):
                MARKER.touch()
                raise DeviceError("cudaGraphLaunch: an illegal memory access was encountered")

            runner.step = fail
        super().execute(requests)
"""


@pytest.fixture(scope="module")
def graph_server(tiny_step_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The text model with steps as graphs, and a tokens model whose device fails."""
    directory = tmp_path_factory.mktemp("graphs")
    others = directory / "others"
    parameters = {"bundle": str(tiny_step_bundle), "num_threads": "1", "step": "graph", "num_nodes": "4"}
    write_repository(others, [TOKENS_MODEL], parameters)
    (others / TOKENS_MODEL / "1" / "model.py").write_text(FAILING_MODEL)
    options = [f"--model-repository={others}", "--model-control-mode=explicit"]
    options += [f"--load-model={name}" for name in (MODEL, TOKENS_MODEL)]
    running = Server(tiny_step_bundle, directory / "log", "--step", "graph", *options)
    yield running
    assert running.stop() == 0


def test_graph_steps_give_the_same_texts(graph_server: Server, decoder: SpeculativeDecoder) -> None:
    for text in PROMPTS:
        (*_, last) = graph_server.ask(text_input=text)
        assert graph_server.text(text_input=text) == expected_text(decoder, text)
        assert last["finish_reason"] == [b"length"]
    warm: Any = {"temperature": 0.8, "seed": 7}
    assert graph_server.text(text_input="x", **warm) == expected_text(decoder, "x", **warm)
    assert graph_server.counter("ctc_nodes") > graph_server.counter("ctc_steps")


def test_a_failed_device_gets_a_new_process(graph_server: Server, decoder: SpeculativeDecoder) -> None:
    """The request that met it ends with its message, and the server is started anew with all its models."""
    with pytest.raises(InferenceServerException, match="an illegal memory access"):
        graph_server.ask(input_ids=[5, 6])
    graph_server.wait_for(RESTARTED)
    assert "cannot serve any more: its device failed: cudaGraphLaunch: an" in graph_server.log.read_text()
    expected = [t for c in decoder.stream([5, 6], max_new_tokens=24) for t in c.token_ids]
    found = [t for response in graph_server.ask(input_ids=[5, 6]) for t in response["output_ids"].reshape(-1)]
    assert found == expected
    assert graph_server.text(text_input="x") == expected_text(decoder, "x")
