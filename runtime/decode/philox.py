"""The random numbers of sampling: one uniform number in [0, 1) for every new token of a text.

The number of the i-th new token comes from a counter-based generator (Philox-4x64-10: Salmon et al., 2011)
keyed by (seed, i). So a seed gives the same text with and without speculation, and alone or in a batch; one
number for each token can also be drawn on a device.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

# Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds of two
# multiplications to 128 bits mix a counter with a key, so any number is computed without those before it.
ROUNDS = 10
# The multipliers, and what the words of the key grow by in each round. In compiled code a product of an
# unsigned and a signed integer is a float, so every constant has its type.
FIRST_FACTOR, SECOND_FACTOR = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
FIRST_STEP, SECOND_STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
HALF, LOWER_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
# A word has 64 bits and a float64 53, so 11 are dropped.
DROPPED = np.uint64(11)
# The largest float32 below 1.
BELOW_ONE = 1 - 2.0**-24


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) for the ``index``-th new token of a text.

    The upper 53 bits of the first word that Philox-4x64-10 gives for the key (seed, index) at counter 1.
    """
    word = int(np.random.Philox(key=np.array([seed, index], np.uint64)).random_raw())
    return (word >> 11) * 2.0**-53


def fill_uniforms(out: NDArray[np.float32], seed: int, first: int) -> None:
    """Write the numbers of the new tokens ``first``, ``first`` + 1, ... into ``out`` [count] as float32.

    Numbers that round to 1 stay just below it. ``seed`` and ``first`` are from 0 to 2^64 - 1.
    """
    _fill_rounded(out, np.uint64(seed), np.uint64(first))


@njit(cache=True)
def _high_word(a: np.uint64, b: np.uint64) -> np.uint64:
    """The upper 64 bits of a product, from products of 32-bit halves."""
    a_low, a_high = a & LOWER_HALF, a >> HALF
    b_low, b_high = b & LOWER_HALF, b >> HALF
    middle = a_high * b_low + ((a_low * b_low) >> HALF)
    other = a_low * b_high + (middle & LOWER_HALF)
    return a_high * b_high + (middle >> HALF) + (other >> HALF)


@njit(cache=True)
def compiled_uniform(seed: np.uint64, index: np.uint64) -> np.float64:
    """``uniform`` bit for bit: the key is (seed, index), and numpy counts to 1 before its first output."""
    first, second, third, fourth = np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(ROUNDS):
        upper, lower = _high_word(FIRST_FACTOR, first), FIRST_FACTOR * first
        other_upper, other_lower = _high_word(SECOND_FACTOR, third), SECOND_FACTOR * third
        first, second, third, fourth = (
            other_upper ^ second ^ seed,
            other_lower,
            upper ^ fourth ^ index,
            lower,
        )
        seed, index = seed + FIRST_STEP, index + SECOND_STEP
    return np.float64(first >> DROPPED) * 2.0**-53


@njit(cache=True)
def _fill_rounded(out: NDArray[np.float32], seed: np.uint64, first: np.uint64) -> None:
    for position in range(out.size):
        out[position] = min(compiled_uniform(seed, first + np.uint64(position)), BELOW_ONE)
