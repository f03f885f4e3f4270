"""Whether a draft head's acceptance probabilities hold in a text, by what was accepted."""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray


@dataclass(frozen=True)
class TrustConstants:
    """Chosen with ``runtime.decode.budget.BudgetConstants``.

    useless_acceptance: the probability with which a draft of a useless head is accepted
    usual_doubt, max_doubt: the least and the largest doubt with which a text begins. Even the largest leaves
        a text one try at once where a node pays if three in ten are accepted.
    changed: share by which the doubt goes back to the usual one after every step: by half in 230 steps
    past_memory: weight of the past in the mean doubt of past texts after a step, which follows fifty steps
    """

    useless_acceptance: float = 0.02
    usual_doubt: float = 0.02
    max_doubt: float = 0.6
    changed: float = 0.003
    past_memory: float = 0.98


DEFAULT_TRUST = TrustConstants()


class PastTexts:
    """What earlier texts of a decoder say of its head, so that a useless one is not found out anew in each.

    doubt: the mean of ``HeadTrust``'s doubt over their steps, the last of which count most
    """

    def __init__(self, constants: TrustConstants = DEFAULT_TRUST):
        self._memory = constants.past_memory
        self.doubt = constants.usual_doubt

    def record(self, doubt: float) -> None:
        """After a step the doubt of a text is ``doubt``."""
        self.doubt += (1 - self._memory) * (doubt - self.doubt)


class HeadTrust:
    """The probability that a head's acceptance probabilities hold in this text.

    The doubt is the probability that the head is useless instead: then a sequence accepts a draft with the
    probability ``useless_acceptance``, however sure the head is. The doubt follows Bayes' rule. A text begins
    with the mean doubt of earlier texts, but with at least ``usual_doubt`` and at most ``max_doubt``. A text
    may turn to what the head knows, so after every step the doubt goes back to ``usual_doubt`` by the share
    ``changed``.
    """

    def __init__(self, constants: TrustConstants = DEFAULT_TRUST, past: PastTexts | None = None):
        self._constants = constants
        self._past = past or PastTexts(constants)
        self._doubt = min(max(self._past.doubt, constants.usual_doubt), constants.max_doubt)

    @property
    def probability(self) -> float:
        return 1 - self._doubt

    def follow(self, first: NDArray[np.float64], are_right: NDArray[np.bool_]) -> None:
        """Learn from the drafts of a step.

        first: float64 [B], the acceptance probability of each sequence's first draft
        are_right: bool [B], whether a draft of the sequence was accepted
        """
        self._doubt = _follow(self._doubt, first, are_right, self._constants.useless_acceptance)

    def end_step(self) -> None:
        """Call it once after every step, also after one without drafts."""
        self._doubt += self._constants.changed * (self._constants.usual_doubt - self._doubt)
        self._past.record(self._doubt)


# Compiled, because every step asks for it.
@njit(cache=True)
def _follow(doubt: float, first: NDArray[np.float64], are_right: NDArray[np.bool_], useless: float) -> float:
    """The doubt after the first drafts of B sequences, by Bayes' rule."""
    for index in range(first.size):
        acceptance = min(max(first[index], useless), 0.99)
        if are_right[index]:
            wrong, right = doubt * useless, (1 - doubt) * acceptance
        else:
            wrong, right = doubt * (1 - useless), (1 - doubt) * (1 - acceptance)
        doubt = wrong / (wrong + right)
    return doubt
