"""Sampling, lossless through the tree: the target model's own draws, whatever was proposed.

At every node the token is drawn from the target model's distribution there. If a child has the token, the
walk descends to it; otherwise the token is the bonus token. Drafts therefore only decide how many draws one
pass serves.

A draw is inverse-transform sampling: one uniform number u in [0, 1), and the first token of the vocabulary,
in its order, at which the cumulative probability of the filtered distribution exceeds u. The number of the
i-th new token comes from a counter-based generator (Philox-4x64-10: Salmon et al., 2011) keyed by (seed, i).
So a seed gives the same text with and without speculation, and alone or in a batch; one number for each token
can also be drawn on a device. Another rounding of the logits changes a draw with about the probability by
which it changes the cumulative distribution.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import MAX_GRAPH_TOP_K
from runtime.decoding.acceptance import Acceptance, GraphSampling
from runtime.decoding.philox import fill_uniforms
from runtime.errors import RequestError
from runtime.trees.token_tree import TokenTree

MAX_SEED = 2**64 - 1
# What OpenAI's interface allows.
MAX_PENALTY = 2.0
# Beyond any use, and far from where logits would overflow.
MAX_BIAS, MAX_REPETITION_PENALTY = 1e4, 100.0


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise RequestError(f"{name}: must be {expected}, got {value}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one text are chosen. The filters apply in the order of the fields.

    logit_bias: added to these tokens' logits
    repetition_penalty: divides the positive logits of tokens in the prompt or the output, multiplies
        the negative ones; 1 is off (arXiv 1909.05858)
    presence_penalty, frequency_penalty: subtracted once, and for every occurrence, from the logits of
        tokens in the output; 0 is off
    temperature: divides the logits; 0 takes the best token
    top_k: only the k most probable tokens and those level with the last of them may be drawn; 0 is all
    top_p: only the smallest set of most probable tokens with this probability (arXiv 1904.09751); 1 is all
    min_p: only tokens at least this likely, relative to the best (arXiv 2407.01082); 0 is all
    seed: 64 bits; None takes a random one
    log_probs: whether to report the emitted tokens' log-probabilities, those of the model itself
        (temperature 1, nothing of the above)
    Raises RequestError for a value out of range.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    log_probs: bool = False

    def __post_init__(self) -> None:
        # Comparisons with NaN are false, so each of these checks refuses it.
        _require(0 <= self.temperature < math.inf, "temperature", "a number from 0 on", self.temperature)
        _require(self.top_k >= 0, "top_k", "0 (off) or more", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        repetition = self.repetition_penalty
        least, most = 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        expected = f"between {least:g} and {most:g}"
        _require(least <= repetition <= most, "repetition_penalty", expected, repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(abs(value) <= MAX_PENALTY, name, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}", value)
        for token, bias in self.logit_bias.items():
            expected = f"between -{MAX_BIAS:g} and {MAX_BIAS:g} for token {token}"
            _require(abs(bias) <= MAX_BIAS, "logit_bias", expected, bias)
        if self.seed is not None:
            _require(0 <= self.seed <= MAX_SEED, "seed", "between 0 and 2^64 - 1", self.seed)

    @property
    def has_penalties(self) -> bool:
        """Whether the output so far changes what may come next."""
        off = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != off

    @property
    def is_argmax(self) -> bool:
        """Whether the graph's argmax is the answer, so that no logits are needed."""
        return not (self.temperature or self.has_penalties or self.logit_bias or self.log_probs)


GREEDY = SamplingParams()


class Sampler:
    """The draws of one text: call ``accept`` for every tree, in order."""

    needs_logits = True

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], vocab_size: int):
        """Raises RequestError for a ``logit_bias`` of a token that the vocabulary lacks."""
        for token in params.logit_bias:
            _require(0 <= token < vocab_size, "logit_bias", f"token ids below {vocab_size}", token)
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
