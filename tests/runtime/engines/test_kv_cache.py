"""The KV slab: growth, alignment and the commit of an accepted path."""

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engines.kv_cache import ALIGNMENT, KVCache
from runtime.errors import RequestError


def make_cache(*, max_capacity: int = 100, bucket: int = 16, batch_size: int = 2) -> KVCache:
    return KVCache(
        num_layers=3,
        batch_size=batch_size,
        num_kv_heads=2,
        head_dim=4,
        max_capacity=max_capacity,
        bucket=bucket,
    )


def fill(cache: KVCache) -> None:
    """A different value in every element, none of them zero."""
    cache.slab[...] = np.arange(1, cache.slab.size + 1, dtype=np.float32).reshape(cache.slab.shape)


def test_starts_with_one_bucket_of_zeros() -> None:
    cache = make_cache()
    assert cache.slab.shape == (6, 2, 2, 16, 4)
    assert cache.slab.dtype == np.float32
    assert cache.capacity == 16
    assert cache.version == 0
    assert not cache.slab.any()


def test_reserve_within_the_capacity_moves_nothing() -> None:
    cache = make_cache()
    slab = cache.slab
    cache.reserve(0)
    cache.reserve(16)
    assert cache.slab is slab
    assert cache.version == 0


def test_growth_keeps_rows_and_zeroes_the_rest() -> None:
    cache = make_cache()
    cache.reserve(16)
    fill(cache)
    before = cache.slab.copy()
    cache.reserve(17)
    assert cache.capacity == 32
    np.testing.assert_array_equal(cache.slab[:, :, :, :16], before)
    assert not cache.slab[:, :, :, 16:].any()


def test_growth_keeps_the_sequences_that_were_named() -> None:
    cache = make_cache(batch_size=4)
    cache.reserve(16, 3)
    fill(cache)
    before = cache.slab.copy()
    cache.reserve(17, 1)
    np.testing.assert_array_equal(cache.slab[:, :3, :, :16], before[:, :3])
    assert not cache.slab[:, 3].any()
    cache.shrink()
    cache.reserve(16, 2)
    fill(cache)
    cache.reserve(17, 2)
    assert cache.slab[:, :2, :, :16].all()
    assert not cache.slab[:, 2:].any()


def test_a_sequence_has_its_memory_from_the_start() -> None:
    """Not when it first holds a long text; what no sequence uses takes none."""
    process, size = psutil.Process(), 64 * 2**20

    def resident() -> float:
        return float(process.memory_info().rss) / size

    begin = resident()
    cache = KVCache(
        num_layers=1, batch_size=64, num_kv_heads=1, head_dim=64, max_capacity=4096, bucket=2048
    )  # 1 MiB a sequence and bucket
    assert resident() - begin < 0.25
    cache.reserve(1, 32)
    assert resident() - begin == pytest.approx(0.5, abs=0.25)
    cache.reserve(2049, 32)
    assert resident() - begin == pytest.approx(1.0, abs=0.25)
    cache.reserve(1, 64)
    assert resident() - begin == pytest.approx(2.0, abs=0.25)


def test_every_move_bumps_the_version() -> None:
    cache = make_cache()
    for version, length in enumerate((17, 33, 65), start=1):
        cache.reserve(length)
        assert cache.version == version
        cache.reserve(length)
        assert cache.version == version


def test_growth_is_geometric() -> None:
    """One token at a time, the number of moves must grow with the logarithm of the length."""
    cache = make_cache(max_capacity=16384, bucket=8, batch_size=1)
    for length in range(1, 16385):
        cache.reserve(length)
    assert cache.version < 40  # 2047 if every bucket were a move


@settings(max_examples=60, deadline=None)
@given(
    max_capacity=st.integers(1, 300),
    bucket=st.integers(1, 80),
    lengths=st.lists(st.integers(0, 300), max_size=6),
)
def test_alignment_and_capacity(max_capacity: int, bucket: int, lengths: list[int]) -> None:
    cache = make_cache(max_capacity=max_capacity, bucket=bucket)
    for length in [0, *lengths]:
        if length <= cache.max_capacity:
            cache.reserve(length)
        assert length <= cache.capacity or length > cache.max_capacity
        assert cache.capacity <= cache.max_capacity < max_capacity + 8
        assert cache.capacity % 8 == 0
        assert cache.slab.flags.c_contiguous
        # Every layer is bound by its own address.
        assert [layer.ctypes.data % ALIGNMENT for layer in cache.slab] == [0] * 6


def test_reserve_beyond_the_maximum_names_it() -> None:
    cache = make_cache(max_capacity=96)
    cache.reserve(96)
    assert cache.capacity == 96
    with pytest.raises(RequestError, match=r"KV cache: 97 rows are needed, the capacity is 96"):
        cache.reserve(97)
    assert (cache.capacity, cache.version) == (96, 1)


def test_the_maximum_is_rounded_up_to_eight_rows() -> None:
    cache = make_cache(max_capacity=42)
    cache.reserve(48)
    assert cache.capacity == cache.max_capacity == 48


@st.composite
def commits(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """(row, start, path): an ascending path from node 0 within the 32 rows of the cache."""
    start = draw(st.integers(0, 20))
    nodes = draw(st.sets(st.integers(1, 31 - start), max_size=8))
    return draw(st.integers(0, 1)), start, [0, *sorted(nodes)]


@settings(max_examples=80, deadline=None)
@given(commit=commits())
def test_commit_equals_a_copy_row_by_row(commit: tuple[int, int, list[int]]) -> None:
    row, start, path = commit
    cache = make_cache(bucket=32)
    fill(cache)
    before = cache.slab.copy()
    cache.commit(row, start, np.array(path, np.int64))

    for to, node in enumerate(path):
        np.testing.assert_array_equal(cache.slab[:, row, :, start + to], before[:, row, :, start + node])
    np.testing.assert_array_equal(cache.slab[:, row, :, :start], before[:, row, :, :start])
    np.testing.assert_array_equal(cache.slab[:, 1 - row], before[:, 1 - row])


def test_commit_moves_nothing_out_of_the_slab() -> None:
    cache = make_cache()
    address = cache.slab.ctypes.data
    cache.commit(0, 3, np.array([0, 2, 5], np.int64))
    assert cache.slab.ctypes.data == address
    assert cache.version == 0
