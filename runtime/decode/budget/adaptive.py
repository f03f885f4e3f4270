"""How many draft nodes a step verifies: as many as pay for themselves.

Decoding is fastest with the number n of nodes that gives the most tokens for each millisecond,

    (1 + gain_1 + ... + gain_n) / ms(n),

where gain_i is the probability that a sequence's i-th best node is accepted, averaged over the last steps,
and ms(n) is the time of a step with n nodes for each sequence on this machine. All sequences have the same n:
a pass is padded to the widest sequence, so nodes that one sequence does not need cannot go to another.

The budget is in one of two states:

    drafting   some n above 0 has the best rate: steps draft n nodes, and the gains follow what they give
    plain      no n has: steps show nothing of drafts, so every gain slowly rises towards 1, until some n
               seems to pay and is tried

A head that does not pay is therefore tried for a step now and then. A drafted step lowers a gain by a tenth
of what it was overestimated, a plain step raises it by a small share of what it lacks of 1: the less drafts
give, the more rarely they are made.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.core.calibration import RunningCalibration
from runtime.decode.budget.constants import DEFAULT_CONSTANTS, BudgetConstants
from runtime.decode.budget.step_costs import StepCosts
from runtime.decode.step import StepResult


class AdaptiveBudget:
    """A ``NodeBudget`` for one run: for a text, or for all texts that share a batch.

    step_ms: [B, N+1] float64, a step of 1, 2, ..., B sequences with 0, 1, ..., N nodes each; a step with 0
        nodes leaves the draft head out
    calibration: of the draft head (``DrafterSpec.calibration``); None takes prefix probabilities as they are
    tree_sizes: numbers of nodes that a step can have, as of ``StepRunner``; empty for any
    """

    def __init__(
        self,
        step_ms: NDArray[np.float64],
        calibration: tuple[float, float] | None,
        constants: BudgetConstants = DEFAULT_CONSTANTS,
        *,
        tree_sizes: Sequence[int] = (),
    ):
        self._constants = constants
        self._costs = StepCosts(step_ms, constants)
        self._calibration = RunningCalibration(*(calibration or (1.0, 0.0)))
        self._gains = constants.first_gain * constants.next_gain ** np.arange(step_ms.shape[1] - 1)
        every = np.arange(step_ms.shape[1])
        self._choices = every[np.isin(every, tree_sizes)] if tree_sizes else every
        self._num_seqs = self._num_nodes = 0
        self._was_drafting = False

    def num_nodes(self, num_seqs: int) -> int:
        rates = _rates(self._gains, self._costs.of(num_seqs))
        best = int(self._choices[rates[self._choices].argmax()])
        self._was_drafting = self._num_nodes > 0
        self._num_seqs, self._num_nodes = num_seqs, best
        return best

    def learn(self, result: StepResult) -> None:
        asked, memory, gains = self._num_nodes, self._constants.gain_memory, self._gains
        if not asked:
            unseen = self._constants.unseen_memory
            self._gains = unseen * gains + (1 - unseen)
            return
        predicted = self._calibration.predict(np.exp(result.node_log_probs))
        self._calibration.update(predicted, int((result.counts - 1).sum()))
        # Nodes that were asked for and not found give nothing. A device may verify more than were asked for.
        verified = predicted.mean(0)[: gains.size]
        seen = max(asked, verified.size)
        found = np.append(verified, np.zeros(seen - verified.size))
        gains[:seen] = memory * gains[:seen] + (1 - memory) * found
        # Nothing was seen of further nodes; they are taken to fall off from the last one that was.
        further = np.arange(1, gains.size - seen + 1)
        gains[seen:] = gains[seen - 1] * self._constants.next_gain**further

    def record_step_time(self, ms: float) -> None:
        # The first step that drafts after plain ones also reads the context that the head has missed. Its
        # time is an upper bound for one that does not.
        believed = self._costs.of(self._num_seqs)[self._num_nodes]
        if self._was_drafting or not self._num_nodes or ms < believed:
            self._costs.record(self._num_seqs, self._num_nodes, ms)


def _rates(gains: NDArray[np.float64], step_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens for each millisecond, [N+1], of a sequence in a step with 0, 1, ..., N nodes."""
    rates: NDArray[np.float64] = (1 + np.append(0.0, gains.cumsum())) / step_ms
    return rates
