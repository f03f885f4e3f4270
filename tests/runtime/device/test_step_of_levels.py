"""Steps of graphs with autoregressive heads, which draft level by level."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.core.bundle import Bundle
from runtime.core.errors import RequestError
from runtime.decode.budget import FixedBudget
from runtime.decode.sampling_params import SamplingParams
from runtime.decoder import SpeculativeDecoder
from tests.batch_runs import GenerateArguments, decode_together, mixed_requests, steps_together
from tests.conftest import LEVEL_HEADS, PROMPTS
from tests.engine_bundles import as_engine_bundle, device_of_memory

MAX_LENGTH = 160
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)


@pytest.fixture(scope="module", params=list(LEVEL_HEADS))
def level_bundle(request: pytest.FixtureRequest, level_bundle_of: Callable[[str], Path]) -> Path:
    return level_bundle_of(request.param)


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(
        bundle, **{"num_threads": 1, "num_nodes": 8, "max_length": MAX_LENGTH, **options}
    )


def prompts_of(decoder: SpeculativeDecoder) -> list[list[int]]:
    # One prompt is longer than what one pass of an engine bundle reads.
    return [decoder.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)]


@contextmanager
def kept_steps(decoder: SpeculativeDecoder) -> Iterator[list[tuple[list[int], NDArray[np.float64]]]]:
    """The new tokens of the first sequence, and the log-probabilities of its drafts, for every step."""
    found: list[tuple[list[int], NDArray[np.float64]]] = []
    runner = decoder.batch.runner
    step = runner.step

    def kept(*arguments: Any) -> Any:
        result = step(*arguments)
        found.append((result.tokens[0, : result.counts[0]].tolist(), result.node_log_probs[0].copy()))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "step", kept)
        yield found


@pytest.fixture(scope="module")
def mixed(tiny_step_bundle: Path) -> tuple[list[GenerateArguments], list[list[int]]]:
    """Requests of every kind, and what the target model, which all heads share, answers by itself."""
    host = load(tiny_step_bundle, step="host", method="plain")
    requests = mixed_requests(prompts_of(host))
    requests[3][1]["sampling"] = PENALISED
    return requests, [
        [token for chunk in host.stream(prompt, **options) for token in chunk.token_ids]
        for prompt, options in requests
    ]


def check_batches(
    device: SpeculativeDecoder, mixed: tuple[list[GenerateArguments], list[list[int]]], seeds: int
) -> None:
    """Requests of every kind join and leave, with another size of tree in every step."""
    requests, expected = mixed
    for seed in range(seeds):
        assert decode_together(device, requests, np.random.default_rng(seed)) == expected


def test_batches_of_the_cpu(
    level_bundle: Path, mixed: tuple[list[GenerateArguments], list[list[int]]]
) -> None:
    check_batches(load(level_bundle, step="graph", max_num_seqs=3), mixed, 2)


def test_batches_on_a_gpu(
    level_bundle: Path,
    mixed: tuple[list[GenerateArguments], list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code for GPUs, on a stand-in whose memory is the host's."""
    engines = as_engine_bundle(
        level_bundle, tmp_path / "bundle", max_num_seqs=3, max_context=256, prefill_chunk=16
    )
    device_of_memory(monkeypatch, engines)
    check_batches(load(engines, max_num_seqs=3), mixed, 1)


@pytest.mark.parametrize("num_nodes", [2, 8])
def test_the_trees_are_those_of_the_host(level_bundle: Path, num_nodes: int) -> None:
    """The same drafts are accepted in every step, and all drafts are as probable."""
    found = []
    for step in ("host", "graph"):
        decoder = load(level_bundle, step=step)
        budget = FixedBudget(num_nodes)
        with kept_steps(decoder) as steps:
            for prompt in prompts_of(decoder)[1:4]:
                list(decoder.stream(prompt, max_new_tokens=24, budget=budget, stop_token_ids=()))
        found.append(steps)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    for (_, expected), (_, log_probs) in zip(*found, strict=True):
        assert np.sort(log_probs) == pytest.approx(np.sort(expected), abs=1e-4)


def test_a_batch_accepts_what_the_host_accepts(level_bundle: Path) -> None:
    host, device = (load(level_bundle, step=step, max_num_seqs=3) for step in ("host", "graph"))
    prompts = prompts_of(host)[3:]
    assert steps_together(device, prompts, 30) == steps_together(host, prompts, 30)


def test_a_bundle_that_lacks_graphs_is_refused(level_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = Bundle.load(level_bundle, verify=False).manifest
    monkeypatch.delitem(manifest.graphs, "prepare")
    monkeypatch.setattr(Bundle, "load", lambda path, verify=True: Bundle(level_bundle, manifest))
    with pytest.raises(RequestError, match=r"no graphs prepare; export it again"):
        load(level_bundle, step="graph")
