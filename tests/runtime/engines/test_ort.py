"""Which shapes an engine keeps bound, and passes that work on copies of short texts."""

import weakref
from pathlib import Path

import numpy as np
import pytest

from runtime.core.bundle import Bundle
from runtime.core.token_tree import TokenTree
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.ort import OrtEngine, ShortForwardPass, cache_tensors
from runtime.engines.recorder import NullRecorder
from runtime.load import host
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


def test_tensors_of_caches_are_the_slab_itself() -> None:
    """A copy would lose what a pass writes."""
    kv = SlabKVCache(num_layers=2, num_slots=3, num_kv_heads=2, head_dim=4, max_capacity=64)
    tensors = cache_tensors(kv, 1, 2)
    assert len(tensors) == 8
    for index in range(2):
        for state in ("past", "present"):
            for kind, row in (("key", 2 * index), ("value", 2 * index + 1)):
                tensor = tensors[f"{state}_{kind}_{index}"]
                assert tensor.data_ptr() == kv.slab[row, 1:].ctypes.data
                assert tensor.shape() == [2, 2, kv.capacity, 4]


def test_a_cache_that_moves_is_bound_anew(engine: OrtEngine) -> None:
    forward = engine.forward_pass(B=1, N=3, M=3)
    engine.kv.reserve(engine.kv.capacity + 1, 1)
    moved = engine.forward_pass(B=1, N=3, M=3)
    assert moved is not forward
    assert moved.inputs["attn_mask"].shape[-1] == engine.kv.capacity


def test_a_cache_that_moves_gives_its_memory_back(engine: OrtEngine) -> None:
    """Without waiting for the next pass: a server may be idle after a long text."""
    engine.forward_pass(B=1, N=3, M=3)
    memory = weakref.ref(engine.kv.slab if engine.kv.slab.base is None else engine.kv.slab.base)
    assert memory() is not None
    engine.kv.reserve(engine.kv.capacity + 1, 1)
    assert memory() is None


def test_short_texts_beside_a_long_one(tiny_bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts and trees have the same bits whether or not passes work on copies."""
    monkeypatch.setattr(host, "has_compiled_form", lambda *_: False)  # which needs no copies
    bundle = Bundle.load(tiny_bundle_dir)
    first, second = np.arange(5, 45), np.arange(60, 75)
    tree = TokenTree(np.arange(5, 9), np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2]), np.zeros(4))
    lengths = [first.size, second.size]
    results = []
    for part in (4, 1000):
        monkeypatch.setattr("runtime.engines.kv_cache.SHORT_PART", part)
        model = load_target_model(bundle, max_nodes=8, num_threads=1, max_num_seqs=3)
        assert isinstance(model.engine, OrtEngine)
        kv = model.engine.kv
        kv.bucket = 64
        kv.reserve(500, 3)
        kv.randomize(3, 500)
        found = []
        for slot, tokens in enumerate((first, second)):
            for start, end in ((0, 10), (10, tokens.size)):
                output = model.prefill(tokens[start:end], start, slot=slot, logits=True)
                assert output.logits is not None
                found.append(output.logits[0].copy())
        output = model.verify([tree, TokenTree.root(9)], lengths, logits=True, recorder=NullRecorder())
        assert output.logits is not None
        found += [output.logits[0].copy(), output.logits[1, :1].copy()]
        model.commit([np.array([0, 2]), np.array([0])], lengths)
        found += [kv.read(0, 0, first.size + 2), kv.read(1, 0, second.size + 1)]
        results.append(found)
        for forward in model.engine._passes.values():
            assert isinstance(forward, ShortForwardPass) == (part == 4)
        # What is behind the texts is as it was.
        found.append(np.copy(kv.slab[:, :, :, 64:500]))
    for short, whole in zip(*results, strict=True):
        np.testing.assert_array_equal(short, whole)
