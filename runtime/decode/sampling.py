"""Acceptance: the longest path of a tree that the target model itself would have written, greedy or sampled.

The text never depends on what was proposed. ``GreedyAcceptor`` follows the target model's most probable
tokens. ``Sampler`` draws the token at every node from the target model's distribution there. If a child has
the token, the walk descends to it; otherwise the token is the bonus token. Drafts therefore only decide how
many draws one pass serves.

A draw is inverse-transform sampling: one uniform number u in [0, 1), and the first token of the vocabulary,
in its order, at which the cumulative probability of the filtered distribution exceeds u. The number of the
i-th new token comes from a counter-based generator (Philox-4x64-10: Salmon et al., 2011) keyed by (seed, i).
So a seed gives the same text with and without speculation, and alone or in a batch; one number for each token
can also be drawn on a device. Another rounding of the logits changes a draw with about the probability by
which it changes the cumulative distribution.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.bundle import MAX_GRAPH_TOP_K
from runtime.core.token_tree import TokenTree
from runtime.decode.sampling_params import SamplingParams, require

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


@dataclass(frozen=True)
class Acceptance:
    """What a verified tree adds to its sequence.

    path: [A] int64 node indices from the root (always 0) to the last accepted node
    bonus: the target model's own token after that node, the root of the next tree
    log_probs: of the A new tokens (the path's after the root, and the bonus); empty where not asked for
    """

    path: NDArray[np.int64]
    bonus: int
    log_probs: tuple[float, ...] = ()


@dataclass(frozen=True)
class GraphSampling:
    """How a graph on a device draws a sequence's tokens; the numbers are as in ``SamplingParams``.

    log_probs: whether the tokens' log-probabilities are wanted
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    log_probs: bool = False


class Acceptor(Protocol):
    """Chooses the tokens of one sequence, tree after tree.

    needs_logits: whether ``accept`` reads logits
    graph_sampling: how a graph on a device may choose them instead; None where only ``accept`` can
    """

    needs_logits: bool
    graph_sampling: GraphSampling | None

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        """Write the numbers [P] that the next tokens are drawn with."""
        ...

    def advance(self, count: int) -> None:
        """A graph has chosen the next ``count`` tokens."""
        ...

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        """Accept a path of the tree and choose the token after it.

        next_tokens: [M] int64, the target model's most probable token after every node; M is at least the
            tree's N + 1 nodes, and the rest is padding
        logits: [M, V]; may be None where ``needs_logits`` is false
        """
        ...


class GreedyAcceptor:
    """Takes the target model's most probable tokens.

    Exact: the accepted tokens and the bonus are those of plain greedy decoding.
    """

    needs_logits = False
    graph_sampling: GraphSampling | None = GraphSampling()

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        return Acceptance(*tree.walk(next_tokens.item))


class Sampler:
    """The draws of one text: call ``accept`` for every tree, in order."""

    needs_logits = True

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int):
        """Raises RequestError for a ``logit_bias`` of a token that the vocabulary lacks."""
        for token in params.logit_bias:
            require(0 <= token < vocab_size, "logit_bias", f"token ids below {vocab_size}", token)
        self._params = params
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._bias = np.fromiter(params.logit_bias.values(), np.float64)
        self._biased = np.fromiter(params.logit_bias, np.int64)
        self._counts = np.zeros(vocab_size, np.int64)
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[np.asarray(prompt_ids, np.int64)] = True
        self._num_drawn = 0
        is_static = not (params.has_penalties or params.logit_bias) and params.top_k <= MAX_GRAPH_TOP_K
        self.graph_sampling: GraphSampling | None = None
        if is_static:
            self.graph_sampling = GraphSampling(
                params.temperature, params.top_k, params.top_p, params.min_p, params.log_probs
            )

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        """As ``Acceptor.fill_uniforms``."""
        fill_uniforms(numbers, self._seed, self._num_drawn)

    def advance(self, count: int) -> None:
        """As ``Acceptor.advance``."""
        self._num_drawn += count

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        """Draw a token at the root, and on at the child that has it, until none has."""
        assert logits is not None
        log_probs: list[float] = []

        def draw(node: int) -> int:
            token = self._draw(logits[node])
            if self._params.log_probs:
                log_probs.append(log_prob(logits[node], token))
            return token

        path, bonus = tree.walk(draw)
        return Acceptance(path, bonus, tuple(log_probs))

    def _draw(self, logits: NDArray[np.float32]) -> int:
        params = self._params
        scores = logits.astype(np.float64)
        if self._biased.size:
            scores[self._biased] += self._bias
        if params.has_penalties:
            self._penalise(scores)
        if params.temperature == 0:
            token = int(scores.argmax())
        else:
            token = inverse_transform(*candidates(scores, params), uniform(self._seed, self._num_drawn))
        self._counts[token] += 1
        self._seen[token] = True
        self._num_drawn += 1
        return token

    def _penalise(self, scores: NDArray[np.float64]) -> None:
        params = self._params
        found = scores[self._seen]
        scores[self._seen] = np.where(
            found > 0, found / params.repetition_penalty, found * params.repetition_penalty
        )
        scores -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) for the ``index``-th new token of a text.

    The upper 53 bits of the first word that Philox-4x64-10 gives for the key (seed, index) at counter 1.
    """
    word = int(np.random.Philox(key=np.array([seed, index], np.uint64)).random_raw())
    return (word >> 11) * 2.0**-53


def inverse_transform(ids: NDArray[np.int64], weights: NDArray[np.float64], u: float) -> int:
    """The first of ``ids`` [C] at which the cumulative weight [C] exceeds the share ``u`` of the whole."""
    cumulative = weights.cumsum()
    total = cumulative[-1]
    # u is below 1, but its product with the total may round to the total.
    target = min(u * total, np.nextafter(total, 0.0))
    return int(ids[cumulative.searchsorted(target, side="right")])


def candidates(
    scores: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn [C], in ascending order, and their probabilities [C] up to a common
    factor.

    scores: [V], the logits with bias and penalties; ``params.temperature`` must be above 0.
    """
    # The largest score is subtracted before the division, so that it is 0 at any temperature and the others
    # are at worst minus infinity.
    with np.errstate(over="ignore"):
        scores = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < scores.size:
        ids = np.flatnonzero(scores >= np.partition(scores, -params.top_k)[-params.top_k])
    else:
        ids = np.arange(scores.size)
    weights = np.exp(scores[ids])
    least = params.min_p
    if params.top_p < 1:
        least = max(least, _nucleus(weights, params.top_p))
    if least > 0:
        kept = weights >= least
        ids, weights = ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: NDArray[np.float64], top_p: float) -> float:
    """The least weight in the smallest set of most probable tokens with the share ``top_p`` of the whole."""
    total = weights.sum()
    # All tokens below this weight have at most 1 - top_p together, so none of them needs to be sorted.
    likely = weights[weights >= (1 - top_p) * total / weights.size]
    likely = np.sort(likely)[::-1]
    last = np.searchsorted(likely.cumsum(), top_p * total)
    return float(likely[min(int(last), likely.size - 1)])


def log_prob(logits: NDArray[np.float32], token: int) -> float:
    """log softmax(logits)[token]"""
    shifted = logits.astype(np.float64) - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


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
