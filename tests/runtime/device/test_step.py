"""Steps of graphs on a device write what steps on the host write."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.options import Options
from runtime.core.errors import RequestError
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import STAGES, StageRecorder, recording
from tests.batch_runs import decode_together, mixed_requests
from tests.conftest import PROMPTS

STEP_NODES = (4, 8)
MAX_LENGTH = 160
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)


@pytest.fixture(scope="module", params=["ctc", "ctc-mlp", "medusa"])
def step_bundle(
    request: pytest.FixtureRequest, trained_heads_dir: Path, make_tiny_bundle: Callable[..., Path]
) -> Path:
    """A bundle with the graphs of device steps."""
    return make_tiny_bundle(trained_heads_dir / request.param, Options(step_nodes=STEP_NODES))


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"verify": False, "num_threads": 1, "num_nodes": 8, **options}
    )


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
    for seed in range(2):
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


def test_plain_steps_need_no_head(tiny_step_bundle: Path) -> None:
    host, device = (load(tiny_step_bundle, step=step, method="plain") for step in ("host", "graph"))
    for prompt in prompts_of(host):
        assert alone(device, prompt, {"max_new_tokens": 20}) == alone(host, prompt, {"max_new_tokens": 20})


def test_log_probs_are_those_of_the_host(tiny_step_bundle: Path) -> None:
    found = []
    for step in ("host", "graph"):
        decoder = load(tiny_step_bundle, step=step)
        sampling = SamplingParams(temperature=0.5, top_k=9, seed=2, log_probs=True)
        prompt = decoder.prompt_tokenizer.encode("x")
        chunks = list(decoder.stream(prompt, max_new_tokens=16, sampling=sampling))
        found.append([piece.log_prob for chunk in chunks for piece in chunk.pieces])
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_stages(tiny_step_bundle: Path) -> None:
    decoder = load(tiny_step_bundle, step="graph")
    with recording(decoder.batch.runner, StageRecorder()) as recorder:
        list(decoder.stream([5, 6], max_new_tokens=12))
    for step in recorder.steps:
        assert [name for name, _ in step.stages[:5]] == list(STAGES)
        ends = [end for _, end in step.stages]
        assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"step": "graph", "device": "cuda:0"}, "device: the ONNX Runtime that is installed runs on no GPU"),
        ({"step": "engine"}, "step: must be one of host, graph"),
        ({"step": "host", "device": "cuda:0"}, "device: steps on the host run on the cpu"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_step_bundle: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        load(tiny_step_bundle, **options)


def test_a_bundle_without_the_graphs_names_the_flag(tiny_bundle_dir: Path) -> None:
    with pytest.raises(RequestError, match="--step-nodes"):
        load(tiny_bundle_dir, step="graph")
