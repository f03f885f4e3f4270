"""The KV slab: growth, alignment, slots and the commit of accepted paths."""

import subprocess
import sys
from weakref import WeakMethod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.core.errors import CacheMemoryError, RequestError
from runtime.engines.kv_cache import ALIGNMENT, SlabKVCache


def make_cache(*, max_capacity: int = 100, bucket: int = 16, num_slots: int = 2) -> SlabKVCache:
    return SlabKVCache(
        num_layers=3,
        num_slots=num_slots,
        num_kv_heads=2,
        head_dim=4,
        max_capacity=max_capacity,
        bucket=bucket,
    )


class Moves:
    """Counts how often a cache's slab moves."""

    def __init__(self, cache: SlabKVCache):
        self.count = 0
        cache.on_move = WeakMethod(self._add)

    def _add(self) -> None:
        self.count += 1


def fill(cache: SlabKVCache) -> None:
    """A different value in every element, none of them zero."""
    cache.slab[...] = np.arange(1, cache.slab.size + 1, dtype=np.float32).reshape(cache.slab.shape)


def test_starts_with_one_bucket_of_zeros() -> None:
    cache = make_cache()
    assert cache.slab.shape == (6, 2, 2, 16, 4)
    assert cache.slab.dtype == np.float32
    assert cache.capacity == 16
    assert not cache.slab.any()


def test_reserve_within_the_capacity_moves_nothing() -> None:
    cache = make_cache()
    slab, moves = cache.slab, Moves(cache)
    cache.reserve(0, 2)
    cache.reserve(16, 2)
    assert cache.slab is slab
    assert moves.count == 0


def test_growth_keeps_positions_and_zeroes_the_rest() -> None:
    cache = make_cache()
    cache.reserve(16, 2)
    fill(cache)
    before = cache.slab.copy()
    cache.reserve(17, 2)
    assert cache.capacity == 48
    np.testing.assert_array_equal(cache.slab[:, :, :, :16], before)
    assert not cache.slab[:, :, :, 16:].any()


def test_growth_keeps_the_slots_that_were_touched() -> None:
    cache = make_cache(num_slots=4)
    cache.reserve(16, 3)
    fill(cache)
    before = cache.slab.copy()
    cache.reserve(17, 1)
    np.testing.assert_array_equal(cache.slab[:, :3, :, :16], before[:, :3])
    assert not cache.slab[:, 3].any()
    for slot in range(4):
        cache.release(slot)
    cache.reserve(16, 2)
    fill(cache)
    cache.reserve(17, 2)
    assert cache.slab[:, :2, :, :16].all()
    assert not cache.slab[:, 2:].any()


MEMORY = """
import psutil
from runtime.engines.kv_cache import SlabKVCache

process, size = psutil.Process(), 64 * 2**20
begin = process.memory_info().rss
# 1 MiB a slot and bucket.
cache = SlabKVCache(num_layers=1, num_slots=64, num_kv_heads=1, head_dim=64, max_capacity=4096, bucket=2048)
print(0, (process.memory_info().rss - begin) / size)
for length, slots, expected in ((1, 32, 0.5), (2049, 32, 1.0), (1, 64, 2.0)):
    cache.reserve(length, slots)
    print(expected, (process.memory_info().rss - begin) / size)
"""


def test_a_slot_has_its_memory_from_the_start() -> None:
    """Not when it first holds a long text; a slot that is not used takes none.

    In a process of its own, because other tests leave memory that comes and goes.
    """
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    rows = [tuple(map(float, line.split())) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    for expected, found in rows:
        assert found == pytest.approx(expected, abs=0.25)


def test_every_move_is_told_and_drops_what_was_made_of_the_slab() -> None:
    cache = make_cache()
    moves = Moves(cache)
    for count, length in enumerate((17, 49, 81), start=1):
        cache.tensors[0, 1] = "a tensor"
        cache.reserve(length, 1)
        assert moves.count == count
        assert not cache.tensors
        cache.reserve(length, 2)
        assert moves.count == count


def test_growth_is_geometric() -> None:
    """One token at a time, the number of moves must grow with the logarithm of the length."""
    cache = make_cache(max_capacity=16384, bucket=8, num_slots=1)
    moves = Moves(cache)
    for length in range(1, 16385):
        cache.reserve(length, 1)
    assert 0 < moves.count < 80  # 2047 if every bucket were a move


@settings(max_examples=60)
@given(
    max_capacity=st.integers(1, 300),
    bucket=st.integers(1, 80),
    lengths=st.lists(st.integers(0, 300), max_size=6),
)
def test_alignment_and_capacity(max_capacity: int, bucket: int, lengths: list[int]) -> None:
    cache = make_cache(max_capacity=max_capacity, bucket=bucket)
    for length in [0, *lengths]:
        if length <= cache.max_capacity:
            cache.reserve(length, 1)
        assert length <= cache.capacity or length > cache.max_capacity
        assert cache.capacity <= cache.max_capacity < max_capacity + 8
        assert cache.capacity % 8 == 0
        assert cache.slab.flags.c_contiguous
        # Every layer is bound by its own address.
        assert [layer.ctypes.data % ALIGNMENT for layer in cache.slab] == [0] * 6


def test_reserve_beyond_the_maximum_names_it() -> None:
    cache = make_cache(max_capacity=96)
    cache.reserve(96, 1)
    assert cache.capacity == 96
    moves = Moves(cache)
    with pytest.raises(RequestError, match=r"KV cache: 97 positions are needed, the capacity is 96"):
        cache.reserve(97, 1)
    assert (cache.capacity, moves.count) == (96, 0)


def test_the_maximum_is_rounded_up_to_eight_positions() -> None:
    cache = make_cache(max_capacity=42)
    cache.reserve(48, 1)
    assert cache.capacity == cache.max_capacity == 48


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_slab_shrinks_when_the_last_slot_is_released(order: tuple[int, ...]) -> None:
    cache = make_cache(num_slots=4)
    moves = Moves(cache)
    cache.reserve(40, 3)
    for count, slot in enumerate(order, start=1):
        assert cache.capacity == 64
        cache.release(slot)
        assert cache.capacity == (16 if count == 3 else 64)
    assert moves.count == 2
    # A slot that is free already changes nothing.
    cache.release(3)
    assert (cache.capacity, moves.count) == (16, 2)


def test_capacity_that_a_long_text_has_left_is_given_back() -> None:
    cache = make_cache(num_slots=3, max_capacity=200)
    cache.reserve(10, 3)
    fill(cache)
    before = cache.slab.copy()
    cache.reserve(120, 2)
    moves = Moves(cache)
    cache.fit(12, 2)
    assert cache.capacity == 144  # the third slot may hold a long text
    cache.release(2)
    cache.fit(40, 2)
    assert cache.capacity == 144  # too little to give back
    cache.fit(12, 2)
    assert (cache.capacity, moves.count) == (32, 1)
    np.testing.assert_array_equal(cache.slab[:, :2, :, :16], before[:, :2])
    cache.fit(90, 2)
    assert cache.capacity == 112


def test_without_memory_the_slab_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(num_slots=2)
    cache.reserve(40, 1)

    def refuse(capacity: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_allocate", refuse)
        with pytest.raises(CacheMemoryError, match="no memory for 96 positions of 2 texts"):
            cache.reserve(70, 1)
        cache.release(0)
        assert cache.capacity == 64
    cache.reserve(70, 1)
    assert cache.capacity == 96


def test_a_small_slab_may_stay_for_the_next_text() -> None:
    sizes = {"num_layers": 1, "num_slots": 1, "num_kv_heads": 1, "head_dim": 4, "bucket": 16}
    for max_capacity, capacities in ((32, [16, 32, 32, 32]), (256, [16, 16, 16, 16])):
        cache = SlabKVCache(**sizes, max_capacity=max_capacity, kept_buckets=2)
        found = []
        for length in (10, 20, 1, 30):
            cache.reserve(length, 1)
            cache.release(0)
            found.append(cache.capacity)
        assert found == capacities


def test_swap_takes_the_first_positions_of_both() -> None:
    cache = make_cache(num_slots=4)
    cache.reserve(40, 4)
    fill(cache)
    before = cache.slab.copy()
    cache.swap(0, 2, (5, 9))
    np.testing.assert_array_equal(cache.slab[:, 0, :, :9], before[:, 2, :, :9])
    np.testing.assert_array_equal(cache.slab[:, 2, :, :5], before[:, 0, :, :5])
    for slot in (1, 3):
        np.testing.assert_array_equal(cache.slab[:, slot], before[:, slot])


def test_swap_with_a_free_slot_moves() -> None:
    cache = make_cache(num_slots=4)
    cache.reserve(40, 4)
    fill(cache)
    before = cache.slab.copy()
    cache.release(1)
    cache.swap(1, 3, (0, 7))
    np.testing.assert_array_equal(cache.slab[:, 1, :, :7], before[:, 3, :, :7])
    np.testing.assert_array_equal(cache.slab[:, 1, :, 7:], before[:, 1, :, 7:])
    for slot in (0, 2, 3):
        np.testing.assert_array_equal(cache.slab[:, slot], before[:, slot])
    for slot in (0, 2):
        cache.release(slot)
    assert cache.capacity == 64  # of slot 1
    cache.release(1)
    assert cache.capacity == 16


@st.composite
def commits(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """(start, path) for the first slot or both: paths ascend from node 0 within 32 positions."""
    found = []
    for _ in range(draw(st.sampled_from([1, 2]))):
        start = draw(st.integers(0, 20))
        nodes = draw(st.sets(st.integers(1, 31 - start), max_size=8))
        found.append((start, [0, *sorted(nodes)]))
    return found


@settings(max_examples=80)
@given(committed=commits())
def test_commit_equals_a_copy_position_by_position(committed: list[tuple[int, list[int]]]) -> None:
    cache = make_cache(bucket=32)
    fill(cache)
    before = cache.slab.copy()
    starts, paths = zip(*committed, strict=True)
    cache.commit(starts, [np.array(path) for path in paths])

    for slot, (start, path) in enumerate(committed):
        for to, node in enumerate(path):
            found, wanted = cache.slab[:, slot, :, start + to], before[:, slot, :, start + node]
            np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(cache.slab[:, slot, :, :start], before[:, slot, :, :start])
    for slot in range(len(committed), 2):
        np.testing.assert_array_equal(cache.slab[:, slot], before[:, slot])


def test_commit_moves_nothing_out_of_the_slab() -> None:
    cache = make_cache()
    address, moves = cache.slab.ctypes.data, Moves(cache)
    cache.commit([3], [np.array([0, 2, 5])])
    assert cache.slab.ctypes.data == address
    assert moves.count == 0
