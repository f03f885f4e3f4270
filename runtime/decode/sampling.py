"""Sampled acceptance: the longest path of a tree whose tokens are those drawn from the target model.

``Sampler`` draws the token at every node from the target model's distribution there. If a child has the
token, the walk descends to it; otherwise the token is the bonus token. Drafts therefore only decide how many
draws one pass serves.

A draw is inverse-transform sampling: one uniform number u in [0, 1), of ``runtime.decode.philox``, and the
first token of the vocabulary, in its order, at which the cumulative probability of the filtered distribution
exceeds u. Another rounding of the logits changes a draw with about the probability by which it changes the
cumulative distribution.
"""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.bundle import MAX_GRAPH_TOP_K
from runtime.core.options import SAMPLING_FILTERS
from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance, GraphSampling
from runtime.decode.grammar import GrammarState
from runtime.decode.philox import fill_uniforms, uniform
from runtime.decode.sampling_params import GRAPH_OPTIONS, SamplingParams, require
from runtime.decode.scores import TokenScore, score_tokens


class Sampler:
    """The draws of one text: call ``accept`` for every tree, in order."""

    needs_logits = True

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        grammar: GrammarState | None = None,
    ):
        """grammar: says which tokens may be drawn; None for all

        Raises RequestError for a ``logit_bias`` of a token that the vocabulary lacks.
        """
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
        self.graph_sampling: GraphSampling | None = None
        if grammar is None and params.sets_only(GRAPH_OPTIONS) and params.top_k <= MAX_GRAPH_TOP_K:
            filters = {name: getattr(params, name) for name in SAMPLING_FILTERS}
            self.graph_sampling = GraphSampling(**filters, log_probs=params.log_probs)

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
