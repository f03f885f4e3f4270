"""Which shapes an engine keeps bound."""

from pathlib import Path

import numpy as np
import pytest

from runtime.core.bundle import Bundle
from runtime.engines.ort import OrtEngine
from runtime.load.host import load_target_model


@pytest.fixture
def engine(tiny_bundle_dir: Path) -> OrtEngine:
    found = load_target_model(Bundle.load(tiny_bundle_dir), max_nodes=8, num_threads=1).engine
    assert isinstance(found, OrtEngine)
    return found


def test_a_shape_is_bound_once(engine: OrtEngine) -> None:
    other = engine.forward_pass(("logits",), B=1, N=4, M=4)
    first = engine.forward_pass(B=1, N=3, M=3)
    assert engine.forward_pass(B=1, N=3, M=3) is first
    assert engine.forward_pass(("logits",), B=1, N=4, M=4) is other
    assert engine.forward_pass(("logits",), B=1, N=3, M=3) not in (first, other)


def test_the_oldest_shapes_go(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.engines.ort.MAX_SHAPES", 3)
    passes = [engine.forward_pass(B=1, N=size, M=size) for size in (5, 4, 3)]
    assert engine.forward_pass(B=1, N=5, M=5) is passes[0]
    added = engine.forward_pass(B=1, N=2, M=2)
    # The second was used longest ago.
    assert engine.forward_pass(B=1, N=5, M=5) is passes[0]
    assert engine.forward_pass(B=1, N=3, M=3) is passes[2]
    assert engine.forward_pass(B=1, N=2, M=2) is added
    assert engine.forward_pass(B=1, N=4, M=4) is not passes[1]


def test_shapes_share_memory(engine: OrtEngine) -> None:
    large, small = engine.forward_pass(B=1, N=4, M=4), engine.forward_pass(B=1, N=3, M=3)
    for name in large.inputs:
        assert np.shares_memory(large.inputs[name], small.inputs[name])
    for name in large.outputs:
        assert np.shares_memory(large.outputs[name], small.outputs[name])


def test_a_larger_shape_moves_the_buffers(engine: OrtEngine) -> None:
    small = engine.forward_pass(B=1, N=3, M=3)
    large = engine.forward_pass(B=1, N=99, M=99)
    again = engine.forward_pass(B=1, N=3, M=3)
    assert again is not small
    assert np.shares_memory(again.inputs["input_ids"], large.inputs["input_ids"])
    assert engine.forward_pass(B=1, N=99, M=99) is large


def test_a_cache_that_moves_is_bound_anew(engine: OrtEngine) -> None:
    forward = engine.forward_pass(B=1, N=3, M=3)
    engine.kv.reserve(engine.kv.capacity + 1, 1)
    moved = engine.forward_pass(B=1, N=3, M=3)
    assert moved is not forward
    assert moved.inputs["attn_mask"].shape[-1] == engine.kv.capacity
