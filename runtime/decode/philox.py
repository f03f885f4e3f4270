"""The uniform numbers of ``runtime.decode.sampling``, many at a time and compiled.

Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds of two
multiplications to 128 bits mix a counter with a key, so any number is computed without those before it.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

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


def uniforms(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) of the new tokens ``first``, ``first`` + 1, ... of a text: [count].

    They equal ``sampling.uniform`` bit for bit. ``seed`` and ``first`` are from 0 to 2^64 - 1.
    """
    out = np.empty(count, np.float64)
    _fill(out, np.uint64(seed), np.uint64(first))
    return out


def fill_uniforms(out: NDArray[np.float32], seed: int, first: int) -> None:
    """Write ``uniforms`` into ``out`` [count] as float32; those that round to 1 stay just below it."""
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
def _uniform(seed: np.uint64, index: np.uint64) -> np.float64:
    """The number of one token: the key is (seed, index), and numpy counts to 1 before its first output."""
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
def _fill(out: NDArray[np.float64], seed: np.uint64, first: np.uint64) -> None:
    for position in range(out.size):
        out[position] = _uniform(seed, first + np.uint64(position))


@njit(cache=True)
def _fill_rounded(out: NDArray[np.float32], seed: np.uint64, first: np.uint64) -> None:
    for position in range(out.size):
        out[position] = min(_uniform(seed, first + np.uint64(position)), BELOW_ONE)
