"""The compiled generator against numpy's, through the reference of the sampler."""

import numpy as np
import pytest

from runtime.decode.sampling import BELOW_ONE, fill_uniforms, uniform, uniforms
from runtime.decode.sampling_params import MAX_SEED

# A token's seed and index whose number is nearer to 1 than to any other float32; found by search.
NEAR_ONE = (0, 5_479_583)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, 2**63, MAX_SEED])
@pytest.mark.parametrize("first", [0, 3, 2**32 - 2, 2**63 - 2, MAX_SEED - 5])
def test_equals_numpys_bit_for_bit(seed: int, first: int) -> None:
    assert uniforms(seed, first, 5).tolist() == [uniform(seed, first + i) for i in range(5)]


def test_random_seeds() -> None:
    random = np.random.default_rng(0)
    for seed in random.integers(0, MAX_SEED, 500, np.uint64, endpoint=True):
        assert uniforms(int(seed), 0, 2).tolist() == [uniform(int(seed), i) for i in range(2)]


def test_no_numbers() -> None:
    assert uniforms(1, 0, 0).shape == (0,)


def test_rounded_to_float32() -> None:
    out = np.empty(1000, np.float32)
    fill_uniforms(out, 5, 7)
    assert np.array_equal(out, uniforms(5, 7, 1000).astype(np.float32))


def test_writes_into_a_view() -> None:
    out = np.full((2, 6), -1, np.float32)
    fill_uniforms(out[1, 2:5], 5, 7)
    assert np.array_equal(out[1, 2:5], uniforms(5, 7, 3).astype(np.float32))
    assert (np.delete(out.ravel(), [8, 9, 10]) == -1).all()


def test_rounding_stays_below_one() -> None:
    seed, index = NEAR_ONE
    exact = uniform(seed, index)
    assert exact < 1
    assert np.float32(exact) == 1
    out = np.empty(1, np.float32)
    fill_uniforms(out, seed, index)
    assert out[0] == BELOW_ONE
    assert out[0] == np.nextafter(np.float32(1), np.float32(0))
