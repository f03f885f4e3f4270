"""How probable the target model finds tokens, and which ones it finds most probable in their place."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenScore:
    """The model's own opinion of a token, at temperature 1 and without filters.

    top: the most probable tokens in its place with their log-probabilities, best first
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: NDArray[np.float32], tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The scores of tokens [N] that follow the positions of ``logits`` [N, V]."""
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
