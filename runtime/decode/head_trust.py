"""Whether a draft head's acceptance probabilities hold in a text, and what earlier texts say of the head.

The doubt is the probability that the head is useless in this text: then a sequence accepts a draft with
the probability ``useless_acceptance``, however sure the head is. The doubt follows Bayes' rule. A text begins
with the mean doubt of earlier texts, but with at least ``usual_doubt`` and at most ``max_doubt``. A text may
turn to what the head knows, so after every step the doubt goes back to ``usual_doubt`` by the share
``changed``.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.decode.records import Record
from runtime.decode.step_costs import MAX_NODES


@dataclass(frozen=True)
class TrustConstants:
    """Chosen with ``runtime.decode.budget_rules.BudgetConstants``.

    useless_acceptance: the probability with which a draft of a useless head is accepted
    usual_doubt, max_doubt: the least and the largest doubt with which a text begins. Even the largest leaves
        a text one try at once where a node pays if three in ten are accepted.
    changed: share by which the doubt goes back to the usual one after every step: by half in 140 steps
    past_memory: weight of the past in the mean doubt of past texts after a step, which follows fifty steps
    """

    useless_acceptance: float = 0.05
    usual_doubt: float = 0.02
    max_doubt: float = 0.7
    changed: float = 0.005
    past_memory: float = 0.98


DEFAULT_TRUST = TrustConstants()
# What is known of past texts, for compiled functions.
# doubt: the mean of the doubt over their steps
# num_drafted, gain_sums: the steps that drafted, and what a sequence was then expected to accept of its i-th
#     best node; fading sums
PAST = np.dtype([("doubt", np.float64), ("num_drafted", np.float64), ("gain_sums", np.float64, (MAX_NODES,))])


class PastTexts:
    """What earlier texts of a decoder say of its head, so that not every text finds it out anew.

    state: ``PAST`` [1]; the last steps count most
    """

    def __init__(self, constants: TrustConstants = DEFAULT_TRUST):
        self.state = np.zeros(1, PAST)
        self.state["doubt"] = constants.usual_doubt

    def first_doubt(self, constants: TrustConstants) -> float:
        """The doubt with which a text begins."""
        return min(max(float(self.state["doubt"][0]), constants.usual_doubt), constants.max_doubt)

    def first_gains(self, assumed: NDArray[np.float64]) -> NDArray[np.float64]:
        """The gains [N] with which a text begins: the mean of past texts where it is more than is assumed.

        With less, a head that knows the new text would not be tried.
        """
        num_drafted = float(self.state["num_drafted"][0])
        if not num_drafted:
            return assumed
        return np.maximum(assumed, self.state["gain_sums"][0, : assumed.size] / num_drafted)


# Compiled, because every step asks for it. ``trust`` and ``past`` are records with a doubt, of a text and of
# past ones; ``constants`` is a record of ``TrustConstants``.


@njit(cache=True)
def follow_first_drafts(
    trust: Record, constants: Record, first: NDArray[np.float64], are_right: NDArray[np.bool_]
) -> None:
    """Learn from the drafts of a step, by Bayes' rule.

    first: float64 [B], the acceptance probability of each sequence's first draft
    are_right: bool [B], whether a draft of the sequence was accepted
    """
    doubt, useless = trust["doubt"], constants["useless_acceptance"]
    for index in range(first.size):
        acceptance = min(max(first[index], useless), 0.99)
        if are_right[index]:
            wrong, right = doubt * useless, (1 - doubt) * acceptance
        else:
            wrong, right = doubt * (1 - useless), (1 - doubt) * (1 - acceptance)
        doubt = wrong / (wrong + right)
    trust["doubt"] = doubt


@njit(cache=True)
def forget_doubt(trust: Record, past: Record, constants: Record) -> None:
    """After every step, also one without drafts: let the doubt go back, and that of past texts follow it."""
    trust["doubt"] += constants["changed"] * (constants["usual_doubt"] - trust["doubt"])
    past["doubt"] += (1 - constants["past_memory"]) * (trust["doubt"] - past["doubt"])
