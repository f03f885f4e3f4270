"""Steps of graphs with autoregressive heads, which draft level by level."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.base import Drafter
from export.options import Options
from runtime.decoder import SpeculativeDecoder
from runtime.decoding.graph_step import GraphStep
from runtime.decoding.sampling import SamplingParams
from tests.batch_runs import decode_together, mixed_requests
from tests.conftest import PROMPTS
from tests.export.test_tensorrt import AUTOREGRESSIVE_HEADS

STEP_NODES = (2, 8)
MAX_LENGTH = 160
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=5)


@pytest.fixture(scope="module", params=list(AUTOREGRESSIVE_HEADS))
def level_bundle(
    request: pytest.FixtureRequest,
    make_tiny_head: Callable[..., Drafter],
    make_tiny_bundle: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A bundle with the graphs of device steps; the host leaves out no level either."""
    directory = tmp_path_factory.mktemp("levels") / request.param
    make_tiny_head(**AUTOREGRESSIVE_HEADS[request.param]).save_pretrained(directory)
    return make_tiny_bundle(directory, Options(step_nodes=STEP_NODES, beam_width=3, min_level_probability=0))


def load(bundle: Path, **options: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_bundle(bundle, verify=False, num_threads=1, **options)


def test_batches_of_the_cpu(level_bundle: Path) -> None:
    """Requests of every kind join and leave, with another size of tree in every step."""
    host = load(level_bundle, step="host")
    prompts = [host.prompt_tokenizer.encode(text) for text in (*PROMPTS, "a b " * 20)]
    requests = mixed_requests(prompts)
    requests[3][1]["sampling"] = PENALISED
    expected = [
        [token for chunk in host.stream(prompt, **options) for token in chunk.token_ids]
        for prompt, options in requests
    ]
    device = load(level_bundle, step="graph", max_num_seqs=3, max_length=MAX_LENGTH)
    for seed in range(3):
        assert decode_together(device, requests, np.random.default_rng(seed)) == expected
