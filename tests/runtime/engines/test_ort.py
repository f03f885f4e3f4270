"""Which shapes an engine keeps bound."""

from pathlib import Path

import numpy as np
import pytest

from runtime.bundle import Bundle
from runtime.engines.ort import OrtEngine
from runtime.load import load_target_model


@pytest.fixture
def engine(tiny_bundle_dir: Path) -> OrtEngine:
    found = load_target_model(Bundle.load(tiny_bundle_dir), max_nodes=8, num_threads=1).engine
    assert isinstance(found, OrtEngine)
    return found


def test_a_shape_is_bound_once(engine: OrtEngine) -> None:
    other = engine.step(("logits",), B=1, N=4, M=4)
    first = engine.step(B=1, N=3, M=3)
    assert engine.step(B=1, N=3, M=3) is first
    assert engine.step(("logits",), B=1, N=4, M=4) is other
    assert engine.step(("logits",), B=1, N=3, M=3) not in (first, other)


def test_the_oldest_shapes_go(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.ort_engine.MAX_SHAPES", 3)
    steps = [engine.step(B=1, N=size, M=size) for size in (5, 4, 3)]
    assert engine.step(B=1, N=5, M=5) is steps[0]
    added = engine.step(B=1, N=2, M=2)
    # The second was used longest ago.
    assert engine.step(B=1, N=5, M=5) is steps[0]
    assert engine.step(B=1, N=3, M=3) is steps[2]
    assert engine.step(B=1, N=2, M=2) is added
    assert engine.step(B=1, N=4, M=4) is not steps[1]


def test_shapes_share_memory(engine: OrtEngine) -> None:
    large, small = engine.step(B=1, N=4, M=4), engine.step(B=1, N=3, M=3)
    for name in large.inputs:
        assert np.shares_memory(large.inputs[name], small.inputs[name])
    for name in large.outputs:
        assert np.shares_memory(large.outputs[name], small.outputs[name])


def test_a_larger_shape_moves_the_buffers(engine: OrtEngine) -> None:
    small = engine.step(B=1, N=3, M=3)
    large = engine.step(B=1, N=9, M=9)
    again = engine.step(B=1, N=3, M=3)
    assert again is not small
    assert np.shares_memory(again.inputs["input_ids"], large.inputs["input_ids"])
    assert engine.step(B=1, N=9, M=9) is large


def test_a_cache_that_moves_is_bound_anew(engine: OrtEngine) -> None:
    step = engine.step(B=1, N=3, M=3)
    engine.kv.reserve(engine.kv.capacity + 1)
    moved = engine.step(B=1, N=3, M=3)
    assert moved is not step
    assert moved.inputs["attn_mask"].shape[-1] == engine.kv.capacity
