"""Steps as graphs, on a stand-in for CUDA and TensorRT."""

from pathlib import Path
from typing import Any

import pytest

from runtime.bundle import PLAIN
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.graph_step import GraphStep
from runtime.engines.recorder import StageRecorder, recording
from tests.device_of_memory import FakeCudart
from tests.engine_bundles import device_of_memory


def tokens(decoder: SpeculativeDecoder, prompt: list[int]) -> list[int]:
    chunks = decoder.stream(prompt, max_new_tokens=12, stop_token_ids=())
    return [token for chunk in chunks for token in chunk.token_ids]


def runner_of(decoder: SpeculativeDecoder) -> GraphStep:
    runner = decoder.batch.runner
    assert isinstance(runner, GraphStep)
    return runner


def test_plain_steps_need_no_head(
    tiny_step_bundle: Path, tiny_engine_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = device_of_memory(monkeypatch, tiny_engine_bundle)
    host = SpeculativeDecoder.from_bundle(tiny_step_bundle, method=PLAIN, step="host")
    plain = SpeculativeDecoder.from_bundle(tiny_engine_bundle, method=PLAIN)
    # The second prompt is longer than a chunk of prefill.
    for prompt in ([5], list(range(2, 40))):
        assert tokens(plain, prompt) == tokens(host, prompt)
    runner_of(plain).close()
    assert cudart.leftovers() == []


def test_a_decoder_takes_no_more_memory_with_every_prompt(
    tiny_engine_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = device_of_memory(monkeypatch, tiny_engine_bundle)
    decoder = SpeculativeDecoder.from_bundle(tiny_engine_bundle, num_nodes=4)
    tokens(decoder, [5])
    before = len(cudart.memory.live()), len(cudart.memory.live(is_pinned=True))
    for prompt in ([6], [7, 8], [9]):
        tokens(decoder, prompt)
    assert (len(cudart.memory.live()), len(cudart.memory.live(is_pinned=True))) == before
    runner_of(decoder).close()


def test_the_work_of_a_device_is_timed_in_steps_captured_or_not(
    tiny_engine_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = device_of_memory(monkeypatch, tiny_engine_bundle)
    decoder = SpeculativeDecoder.from_bundle(tiny_engine_bundle, num_nodes=4)
    runner = runner_of(decoder)
    found = []
    for capture in (True, False):
        runner.capture, runner.times_device = capture, True
        launches = count_launches(cudart, monkeypatch)
        with recording(runner, StageRecorder(wants_stages=False)) as recorder:
            found.append(tokens(decoder, [5]))
        assert len(launches) == (len(recorder.steps) if capture else 0)
        for step in recorder.steps:
            assert [name for name, _ in step.stages] == ["device"]
            assert 0 < step.stage_ms("device") < step.step_ms
    assert found[0] == found[1]
    runner.close()


def count_launches(cudart: FakeCudart, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for every launch of a captured graph from now on."""
    launches: list[None] = []
    launch = cudart.cudaGraphLaunch

    def counted(*arguments: Any) -> Any:
        launches.append(None)
        return launch(*arguments)

    monkeypatch.setattr(cudart, "cudaGraphLaunch", counted)
    return launches
