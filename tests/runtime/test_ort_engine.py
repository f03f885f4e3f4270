"""Which shapes an engine keeps bound."""

from pathlib import Path

import pytest

from runtime.bundle import Bundle
from runtime.load import load_backbone
from runtime.ort_engine import OrtEngine


@pytest.fixture
def engine(tiny_bundle_dir: Path) -> OrtEngine:
    found = load_backbone(Bundle.load(tiny_bundle_dir), max_nodes=8, num_threads=1).engine
    assert isinstance(found, OrtEngine)
    return found


def test_a_shape_is_bound_once(engine: OrtEngine) -> None:
    first, other = engine.step(B=1, N=3, M=3), engine.step(B=1, N=4, M=4)
    assert engine.step(B=1, N=3, M=3) is first
    assert engine.step(("logits",), B=1, N=3, M=3) not in (first, other)
    assert first.num_bytes < other.num_bytes


def test_the_oldest_shapes_go(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [engine.step(B=1, N=size, M=size) for size in (3, 4, 5)]
    room = sum(step.num_bytes for step in steps)
    monkeypatch.setattr("runtime.ort_engine.MAX_BYTES", room)
    assert engine.step(B=1, N=3, M=3) is steps[0]
    added = engine.step(B=1, N=2, M=2)
    # The second was used longest ago, and is enough.
    assert engine.step(B=1, N=3, M=3) is steps[0]
    assert engine.step(B=1, N=5, M=5) is steps[2]
    assert engine.step(B=1, N=2, M=2) is added
    monkeypatch.setattr("runtime.ort_engine.MAX_BYTES", 1)
    last = engine.step(B=1, N=4, M=4)
    assert last is not steps[1]
    assert engine.step(B=1, N=4, M=4) is last
    assert engine.step(B=1, N=3, M=3) is not steps[0]


def test_a_cache_that_moves_is_bound_anew(engine: OrtEngine) -> None:
    step = engine.step(B=1, N=3, M=3)
    engine.kv.reserve(engine.kv.capacity + 1)
    moved = engine.step(B=1, N=3, M=3)
    assert moved is not step
    assert moved.inputs["attn_mask"].shape[-1] == engine.kv.capacity
