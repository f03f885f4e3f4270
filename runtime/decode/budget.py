"""How many draft nodes a step verifies: as many as pay for themselves.

A step that verifies n nodes for each sequence gives

    tokens(n) = 1 + gain_1 + ... + gain_n

tokens a sequence and takes ms(n) milliseconds on this machine. gain_i is the probability that a sequence's
i-th best node is accepted. All sequences have the same n: a pass is padded to the widest sequence, so nodes
that one sequence does not need cannot go to another. Over many steps, tokens for each millisecond are most
where every step maximises tokens(n) - rate * ms(n), with the rate that results (Dinkelbach, 1967, on
fractional programs). There are three choices in a step.

Whether the head runs at all. The worth of a step that drafts is what it gives more than a plain one, less
what the additional milliseconds give elsewhere:

    gain_1 + ... + gain_n - rate * (ms(n) - ms(0)),

where ms(n) has the time of the draft in it, also if n = 0 of its nodes are verified. The head runs while the
mean worth of the last drafted steps is above 0. Plain steps show nothing of drafts. In them the worth slowly
rises, until it is above 0 and the head is tried: the more rarely, the less its drafts gave.

How many nodes the head drafts: by gains averaged over the last drafted steps, the n with the best rate
tokens(n) / ms(n).

How many of them are verified. After the draft the probabilities of this step's nodes are known: a node is
verified if it gives more than its milliseconds give elsewhere. The token that a step without nodes gives
shows whether the first draft was right. A device verifies a fixed number of nodes, without this choice.

A head may also be sure of what is wrong, in a text that it does not know or because it was trained for
another model. The doubt is the probability that the head is useless in this text, so that a draft is accepted
with the probability ``useless_acceptance``, however sure the head is. It follows, by Bayes' rule, whether
drafts are accepted. Acceptance probabilities are multiplied by 1 - doubt, and where the doubt is large, the
worth also rises more slowly. A text begins with the mean doubt of earlier texts, between ``usual_doubt`` and
``max_doubt``. It may turn to what the head knows, so after every step the doubt goes back to ``usual_doubt``
by the share ``changed``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.calibration import RunningCalibration
from runtime.decode.budget_rules import (
    DEFAULT_CONSTANTS,
    KNOWN,
    PAST,
    RATES,
    BudgetConstants,
    begin_step,
    choose_verified,
    end_step,
)
from runtime.decode.step import StepResult
from runtime.decode.step_costs import StepCosts, as_record


class NodeBudget:
    """Chooses how many draft nodes each sequence of the next step has, and learns from the result."""

    def num_nodes(self, num_seqs: int) -> int:
        """How many are drafted in a step of ``num_seqs`` sequences; 0 leaves the draft head out."""
        raise NotImplementedError

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        """How many of those drafted are verified, by their log probabilities as in ``StepResult``."""
        return node_log_probs.shape[1]

    def learn(self, result: StepResult, ms: float | None = None) -> None:
        """Learn from a step that took ``ms`` milliseconds; None where its time says nothing."""


class FixedBudget(NodeBudget):
    """Every sequence has up to ``count`` draft nodes in every step."""

    def __init__(self, count: int):
        self._count = count

    def num_nodes(self, num_seqs: int) -> int:
        return self._count


class PastTexts:
    """What earlier texts of a decoder say of its head; ``state`` is a ``PAST`` [1]."""

    def __init__(self, constants: BudgetConstants = DEFAULT_CONSTANTS):
        self.state = np.zeros(1, PAST)
        self.state["doubt"] = constants.usual_doubt

    def first_doubt(self, constants: BudgetConstants) -> float:
        return min(max(float(self.state["doubt"][0]), constants.usual_doubt), constants.max_doubt)

    def first_gains(self, assumed: NDArray[np.float64]) -> NDArray[np.float64]:
        """The gains [N] with which a text begins: the mean of past texts where it is more than is assumed.

        With less, a head that knows the new text would not be tried.
        """
        num_drafted = float(self.state["num_drafted"][0])
        if not num_drafted:
            return assumed
        return np.maximum(assumed, self.state["gain_sums"][0, : assumed.size] / num_drafted)


# Of a step that has verified its drafts, or has none.
NONE_UNVERIFIED = np.empty(0, np.bool_)


class AdaptiveBudget(NodeBudget):
    """The budget of one run: of a text, or of all texts that share a batch.

    costs: of steps on this machine; budgets of one decoder share them, because they do not depend on the text
    calibration: of the draft head (``DrafterSpec.calibration``); None takes prefix probabilities as they are
    tree_sizes: numbers of nodes that a step can have, as of ``StepRunner``; empty for any
    past: of earlier texts, which the budgets of one decoder share; None begins without any
    """

    def __init__(
        self,
        costs: StepCosts,
        calibration: tuple[float, float] | None,
        constants: BudgetConstants = DEFAULT_CONSTANTS,
        *,
        tree_sizes: Sequence[int] = (),
        past: PastTexts | None = None,
    ):
        self._costs = costs
        self._past = past or PastTexts(constants)
        known = self._known = np.zeros(1, KNOWN)
        known["constants"] = as_record(constants)
        known["doubt"] = self._past.first_doubt(constants)
        known["calibration"] = RunningCalibration(*(calibration or (1.0, 0.0))).state
        most = costs.max_nodes
        gains = constants.first_gain * (1 - known["doubt"]) * constants.next_gain ** np.arange(most)
        known["num_gains"], known["gains"][0, :most] = most, self._past.first_gains(gains)
        drafted = [size for size in range(1, most + 1) if not tree_sizes or size in tree_sizes]
        known["num_drafted_sizes"], known["drafted_sizes"][0, : len(drafted)] = len(drafted), drafted
        verified = constants.verified_nodes
        known["num_verified_sizes"], known["verified_sizes"][0, : len(verified)] = len(verified), verified
        # By the number of sequences.
        self._rates: dict[int, NDArray[np.void]] = {}
        # The number of sequences of the last step, and how many nodes the next one drafts if it has as many.
        self._num_seqs, self._next_nodes = 0, 0

    def num_nodes(self, num_seqs: int) -> int:
        if num_seqs != self._num_seqs:
            rates = self._rates.setdefault(num_seqs, np.zeros(1, RATES))
            self._next_nodes = begin_step(self._known, rates, self._costs.records(num_seqs)[0])
            self._num_seqs = num_seqs
        return self._next_nodes

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        num_seqs = self._num_seqs
        return choose_verified(
            self._known, self._rates[num_seqs], *self._costs.records(num_seqs), node_log_probs
        )

    def learn(self, result: StepResult, ms: float | None = None) -> None:
        num_seqs, log_probs, are_right = self._num_seqs, result.node_log_probs, NONE_UNVERIFIED
        if result.unverified is not None:
            log_probs, are_right = result.unverified.log_probs, result.unverified.are_right
        self._next_nodes = end_step(
            self._known,
            self._rates[num_seqs],
            *self._costs.records(num_seqs),
            self._past.state,
            log_probs,
            result.counts,
            are_right,
            result.draft_ms,
            ms or 0.0,
        )
        self._costs.forget_others(num_seqs)
