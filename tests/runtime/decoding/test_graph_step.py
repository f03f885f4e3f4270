"""Steps of graphs on a device write what steps on the host write."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.options import Options
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.graph_step import GraphStep
from runtime.decoding.node_budget import FixedBudget
from runtime.decoding.sampling import SamplingParams
from runtime.engines.recorder import STAGES, StageRecorder, recording
from runtime.errors import DeviceError, RequestError
from tests.batch_runs import decode_together, mixed_requests
from tests.conftest import PROMPTS
from tests.device_of_memory import FakeCudart
from tests.engine_bundles import as_engine_bundle, device_of_memory

STEP_NODES = (3, 8)
MAX_LENGTH = 160
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)


@pytest.fixture(scope="module", params=["ctc", "ctc-mlp", "medusa"])
def step_bundle(
    request: pytest.FixtureRequest, trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]
) -> Path:
    """A bundle with the graphs of device steps."""
    return make_tiny_bundle(trained_heads_dir / request.param, Options(step_nodes=STEP_NODES))


@pytest.fixture(scope="module")
def ctc_bundle(trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]) -> Path:
    return make_tiny_bundle(trained_heads_dir / "ctc", Options(step_nodes=STEP_NODES))


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(bundle, verify=False, num_threads=1, **options)


def prompts_of(decoder: SpeculativeDecoder) -> list[list[int]]:
    # One prompt is longer than what one pass reads.
    return [decoder.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)]


def alone(decoder: SpeculativeDecoder, prompt: Sequence[int], options: dict[str, Any]) -> list[int]:
    return [token for chunk in decoder.stream(prompt, **options) for token in chunk.token_ids]


def test_batches_of_the_cpu(step_bundle: Path) -> None:
    """Requests of every kind join and leave, with another size of tree in every step."""
    host = load(step_bundle, step="host")
    requests = mixed_requests(prompts_of(host))
    requests[3][1]["sampling"] = PENALISED
    expected = [alone(host, *request) for request in requests]
    device = load(step_bundle, step="graph", max_num_seqs=3, max_length=MAX_LENGTH)
    for seed in range(3):
        assert decode_together(device, requests, np.random.default_rng(seed)) == expected
    half = decode_together(device, requests, np.random.default_rng(9), dropped=frozenset({1, 4}))
    assert [half[index] for index in (0, 2, 3, 5)] == [expected[index] for index in (0, 2, 3, 5)]


def test_drafts_are_accepted(step_bundle: Path) -> None:
    """As many as on the host, where the search is exact."""
    accepted = []
    for step in ("host", "graph"):
        decoder = load(step_bundle, step=step)
        steps = [
            list(decoder.stream(prompt, max_new_tokens=24, budget=FixedBudget(8)))
            for prompt in prompts_of(decoder)[:3]
        ]
        accepted.append(sum(map(len, steps)))
    assert accepted[1] <= accepted[0] * 1.1
    assert accepted[1] < 3 * 18


def test_plain_steps_need_no_head(ctc_bundle: Path) -> None:
    host, device = (load(ctc_bundle, step=step, method="plain") for step in ("host", "graph"))
    for prompt in prompts_of(host):
        assert alone(device, prompt, {"max_new_tokens": 20}) == alone(host, prompt, {"max_new_tokens": 20})


def test_log_probs_are_those_of_the_host(ctc_bundle: Path) -> None:
    found = []
    for step in ("host", "graph"):
        decoder = load(ctc_bundle, step=step)
        sampling = SamplingParams(temperature=0.5, top_k=9, seed=2, log_probs=True)
        prompt = decoder.prompt_tokenizer.encode("x")
        chunks = list(decoder.stream(prompt, max_new_tokens=16, sampling=sampling))
        found.append([piece.log_prob for chunk in chunks for piece in chunk.pieces])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_stages(ctc_bundle: Path) -> None:
    decoder = load(ctc_bundle, step="graph")
    with recording(decoder.batch.runner, StageRecorder()) as recorder:
        list(decoder.stream([5, 6], max_new_tokens=12))
    for step in recorder.steps:
        assert [name for name, _ in step.stages[:5]] == list(STAGES)
        ends = [end for _, end in step.stages]
        assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": "graph", "device": "cuda:0"}, "device: onnxruntime runs on the cpu"),
        ({"step": "engine"}, "step: must be one of host, graph"),
        ({"step": "host", "device": "cuda:0"}, "device: steps on the host run on the cpu"),
    ],
)
def test_what_does_not_fit_is_refused(ctc_bundle: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        load(ctc_bundle, **options)


def test_a_bundle_without_the_graphs_names_the_flag(tiny_bundle_dir: Path) -> None:
    with pytest.raises(RequestError, match="--step-nodes"):
        load(tiny_bundle_dir, step="graph")


class TestDeviceOfMemory:
    """The code for GPUs, unchanged, on a stand-in whose device memory is the host's."""

    @pytest.fixture(scope="class")
    def engine_bundle(self, ctc_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("engines") / "bundle"
        return as_engine_bundle(ctc_bundle, out, max_num_seqs=3, max_context=MAX_LENGTH, prefill_chunk=16)

    @pytest.fixture
    def cudart(self, monkeypatch: pytest.MonkeyPatch, engine_bundle: Path) -> FakeCudart:
        return device_of_memory(monkeypatch, engine_bundle)

    def test_batches(self, ctc_bundle: Path, engine_bundle: Path, cudart: FakeCudart) -> None:
        host = load(ctc_bundle, step="host")
        requests = mixed_requests(prompts_of(host))
        requests[3][1]["sampling"] = PENALISED
        expected = [alone(host, *request) for request in requests]
        device = load(engine_bundle, max_num_seqs=3, max_length=MAX_LENGTH)
        assert isinstance(device.batch.runner, GraphStep)
        for seed in range(3):
            assert decode_together(device, requests, np.random.default_rng(seed)) == expected

    def test_limits_of_the_engines(self, engine_bundle: Path, cudart: FakeCudart) -> None:
        with pytest.raises(RequestError, match="max_num_seqs: the engines were compiled for at most 3"):
            load(engine_bundle, max_num_seqs=4, max_length=MAX_LENGTH)

    def test_a_step_is_one_launch_and_one_read(self, engine_bundle: Path, cudart: FakeCudart) -> None:
        decoder = load(engine_bundle, max_length=MAX_LENGTH)
        steps = decoder.stream([5, 6, 7], max_new_tokens=60, stop_token_ids=(), budget=FixedBudget(8))
        for _ in range(4):
            next(steps)
        calls = count_calls(cudart)
        next(steps)
        assert calls == {"cudaGraphLaunch": 1, "cudaStreamSynchronize": 1}

    def test_a_driver_error_ends_the_decoder_and_a_new_one_can_be_made(
        self, engine_bundle: Path, cudart: FakeCudart
    ) -> None:
        decoder = load(engine_bundle, max_length=MAX_LENGTH)
        expected = alone(decoder, [5, 6, 7], {"max_new_tokens": 20})
        cudart.fail_next("cudaGraphLaunch", 2)
        with pytest.raises(DeviceError, match="cudaGraphLaunch"):
            alone(decoder, [5, 6, 7], {"max_new_tokens": 20})
        again = load(engine_bundle, max_length=MAX_LENGTH)
        assert alone(again, [5, 6, 7], {"max_new_tokens": 20}) == expected

    def test_out_of_memory_says_what_needs_less(self, engine_bundle: Path, cudart: FakeCudart) -> None:
        cudart.memory_limit = 2**16
        with pytest.raises(DeviceError, match="max_length"):
            load(engine_bundle, max_length=MAX_LENGTH)


def count_calls(cudart: FakeCudart) -> dict[str, int]:
    """Calls of the driver from now on, by function."""
    calls: dict[str, int] = {}
    for name in dir(cudart):
        if name.startswith("cuda") and callable(function := getattr(cudart, name)) and name[4].isupper():
            if isinstance(function, type):
                continue

            def counted(*arguments: Any, _name: str = name, _function: Any = function) -> Any:
                calls[_name] = calls.get(_name, 0) + 1
                return _function(*arguments)

            setattr(cudart, name, counted)
    return calls
