"""The compiled generator against numpy's, through the reference of the sampler."""

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.decode.acceptance import BELOW_ONE, compiled_uniform, fill_uniforms, uniform
from runtime.decode.sampling_params import MAX_SEED

# A token's seed and index whose number is nearer to 1 than to any other float32; found by search.
NEAR_ONE = (0, 5_479_583)


def exact(seed: int, first: int, count: int) -> list[float]:
    """The numbers of numpy's generator."""
    return [uniform(seed, first + i) for i in range(count)]


def compiled(seed: int, first: int, count: int) -> list[float]:
    return [float(compiled_uniform(np.uint64(seed), np.uint64(first + i))) for i in range(count)]


def written(seed: int, first: int, count: int) -> NDArray[np.float32]:
    out = np.full(count, np.nan, np.float32)
    fill_uniforms(out, seed, first)
    return out


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, 2**63, MAX_SEED])
@pytest.mark.parametrize("first", [0, 3, 2**32 - 2, 2**63 - 2, MAX_SEED - 5])
def test_equals_numpys_bit_for_bit(seed: int, first: int) -> None:
    assert compiled(seed, first, 5) == exact(seed, first, 5)
    assert np.array_equal(written(seed, first, 5), np.array(exact(seed, first, 5), np.float32))


def test_random_seeds() -> None:
    random = np.random.default_rng(0)
    for seed in random.integers(0, MAX_SEED, 500, np.uint64, endpoint=True):
        assert compiled(int(seed), 0, 2) == exact(int(seed), 0, 2)


def test_no_numbers() -> None:
    assert written(1, 0, 0).shape == (0,)


def test_rounded_to_float32() -> None:
    assert np.array_equal(written(5, 7, 1000), np.array(exact(5, 7, 1000), np.float32))


def test_writes_into_a_view() -> None:
    out = np.full((2, 6), -1, np.float32)
    fill_uniforms(out[1, 2:5], 5, 7)
    assert np.array_equal(out[1, 2:5], np.array(exact(5, 7, 3), np.float32))
    assert (np.delete(out.ravel(), [8, 9, 10]) == -1).all()


def test_rounding_stays_below_one() -> None:
    seed, index = NEAR_ONE
    number = uniform(seed, index)
    assert number < 1
    assert np.float32(number) == 1
    out = written(seed, index, 1)
    assert out[0] == BELOW_ONE
    assert out[0] == np.nextafter(np.float32(1), np.float32(0))
