"""Acceptance: the longest path of a tree that the target model itself would have written.

The text never depends on what was proposed, which only decides how many tokens one pass gives. At every node
a token is chosen: the target model's most probable one, or one drawn from its distribution there. If a child
has the token, the walk descends to it, otherwise the token is the bonus token.

A draw is inverse-transform sampling: one uniform number u in [0, 1), and the first token of the vocabulary,
in its order, at which the cumulative probability of the filtered distribution exceeds u. Another rounding of
the logits changes a draw with about the probability by which it changes the cumulative distribution. The
number of the i-th new token comes from a counter-based generator (Philox-4x64-10: Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011) keyed by (seed, i). So a seed gives the same text with and without
speculation, and alone or in a batch; one number for each token can also be drawn on a device.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.bundle import MAX_GRAPH_TOP_K
from runtime.core.token_tree import TokenTree
from runtime.decode.grammar import GrammarState
from runtime.decode.sampling_params import GRAPH_OPTIONS, GREEDY, SamplingParams, require

# Philox-4x64-10: ten rounds of two multiplications to 128 bits mix a counter with a key, so any number is
# computed without those before it.
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
class TokenScore:
    """The model's own opinion of a token, at temperature 1 and without filters.

    top: the most probable tokens in its place with their log-probabilities, best first
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: NDArray[np.float32], tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The scores of tokens [N] that follow ``logits`` [N, V]."""
    scores = []
    for row, token in zip(logits, tokens, strict=True):
        shifted = row.astype(np.float64) - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        top = [(int(best), float(log_probs[best])) for best in _best(row, num_top)]
        scores.append(TokenScore(float(log_probs[token]), tuple(top)))
    return scores


def _best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ``count`` most probable tokens, best first; of equal ones, those that the vocabulary has first."""
    if not count:
        return np.empty(0, np.int64)
    least = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


@dataclass(frozen=True)
class Acceptance:
    """What a verified tree adds to its sequence.

    path: [A] int64 node indices from the root (always 0) to the last accepted node
    bonus: the target model's own token after that node, the root of the next tree
    scores: of the A new tokens (the path's after the root, and the bonus); empty where not asked for
    """

    path: NDArray[np.int64]
    bonus: int
    scores: tuple[TokenScore, ...] = ()


class Acceptor:
    """Chooses the tokens of one sequence, tree after tree.

    needs_logits: whether ``accept`` reads logits
    graph_sampling: how a graph on a device may choose them instead; None where only ``accept`` can
    """

    needs_logits = False
    graph_sampling: SamplingParams | None = None

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        """Write the numbers [P] that the next tokens are drawn with, if any are."""

    def advance(self, count: int) -> None:
        """A graph has chosen the next ``count`` tokens."""

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        """Accept a path of the tree and choose the token after it.

        next_tokens: [M] int64, the target model's most probable token after every node; M is at least the
            tree's N + 1 nodes, and the rest is padding
        logits: [M, V]; may be None where ``needs_logits`` is false
        """
        raise NotImplementedError


class GreedyAcceptor(Acceptor):
    """Takes the target model's most probable tokens, which are those of plain greedy decoding."""

    graph_sampling = GREEDY

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        return Acceptance(*tree.walk(next_tokens.item))


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


class Sampler(Acceptor):
    """The draws of one text: call ``accept`` for every tree, in order."""

    needs_logits = True

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ):
        """Raises RequestError for a ``logit_bias`` of a token that the vocabulary lacks."""
        for token in params.logit_bias:
            require(0 <= token < vocab_size, "logit_bias", f"token ids below {vocab_size}", token)
        self._params = params
        self._grammar = grammar
        self._seed = secrets.randbits(64) if params.seed is None else params.seed
        self._bias = np.fromiter(params.logit_bias.values(), np.float64)
        self._biased = np.fromiter(params.logit_bias, np.int64)
        self._counts = np.zeros(vocab_size, np.int64)
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[np.asarray(prompt_ids, np.int64)] = True
        self._num_drawn = 0
        if grammar is None and params.sets_only(GRAPH_OPTIONS) and params.top_k <= MAX_GRAPH_TOP_K:
            self.graph_sampling = params

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        fill_uniforms(numbers, self._seed, self._num_drawn)

    def advance(self, count: int) -> None:
        self._num_drawn += count

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        assert logits is not None
        scores: list[TokenScore] = []
        params = self._params

        def draw(node: int) -> int:
            token = self._draw(logits[node])
            if params.log_probs or params.top_log_probs:
                scores.extend(score_tokens(logits[node][None], [token], params.top_log_probs))
            return token

        path, bonus = tree.walk(draw)
        return Acceptance(path, bonus, tuple(scores))

    def _draw(self, logits: NDArray[np.float32]) -> int:
        params = self._params
        scores = logits.astype(np.float64)
        if self._biased.size:
            scores[self._biased] += self._bias
        if params.has_penalties:
            self._penalise(scores)
        if self._grammar is not None:
            scores[~self._grammar.allowed()] = -np.inf
        if params.temperature == 0:
            token = int(scores.argmax())
        else:
            token = inverse_transform(*candidates(scores, params), uniform(self._seed, self._num_drawn))
        self._counts[token] += 1
        self._seen[token] = True
        self._num_drawn += 1
        if self._grammar is not None:
            self._grammar.advance(token)
        return token

    def _penalise(self, scores: NDArray[np.float64]) -> None:
        params = self._params
        found = scores[self._seen]
        scores[self._seen] = np.where(
            found > 0, found / params.repetition_penalty, found * params.repetition_penalty
        )
        scores -= params.frequency_penalty * self._counts + params.presence_penalty * (self._counts > 0)


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
