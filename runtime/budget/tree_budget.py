"""How many drafts a step verifies: as many as pay for themselves.

Decoding is fastest where tokens over time are, over the whole run. A ratio of sums is maximised by
taking in every step the size n with the largest

    E(n) - rate * cost(n),      E(n) = sum over rows of 1 + psi'_1 + ... + psi'_n

(Dinkelbach, 1967): psi' are a row's best drafts' calibrated probabilities, so E(n) is the expected number
of tokens, and cost(n) the time of a step of n drafts a row on this machine. The rate is that of the run so
far. All rows have the same n, since a pass is as wide as its widest row: what a row leaves, none can use.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from runtime.budget.calibration import RunningCalibration
from runtime.budget.draft_worth import DraftWorth, Search
from runtime.budget.step_costs import StepCosts
from runtime.decoding.sequence import Row
from runtime.trees.token_tree import TokenTree

# The weight of the steps before in the next one's rate.
MEMORY = 0.98


class TreeBudget:
    """What choosing needs to know before decoding begins.

    step_ms: [B, N+1] float64, a step of 1, 2, ..., B rows with 0, 1, ..., N drafts each; one without drafts
        leaves the draft head out
    calibration: of the draft head, None as stated
    """

    def __init__(self, step_ms: NDArray[np.float64], calibration: tuple[float, float] | None):
        self.step_ms = step_ms
        self._calibration = calibration or (1.0, 0.0)

    @property
    def num_nodes(self) -> int:
        """Drafts a row may have at most."""
        return self.step_ms.shape[1] - 1

    def start(self) -> "RunningBudget":
        """The budget of one run: of a text, or of all that share a batch."""
        return RunningBudget(self.step_ms, self._calibration)


class RunningBudget:
    """One run's budget, a ``runtime.batch.Plan``: ``drafting``, ``cut``, ``update`` and ``took`` in turns.

    Every row has a calibration of its own, since texts differ.
    """

    def __init__(self, step_ms: NDArray[np.float64], calibration: tuple[float, float]):
        self._costs = StepCosts(step_ms)
        self._fitted = calibration
        self._calibrations: WeakKeyDictionary[Row, RunningCalibration] = WeakKeyDictionary()
        # Of the step at hand: what was said of every row's drafts.
        self._predicted: list[NDArray[np.float64]] = []
        # Forgetful sums of tokens and milliseconds by number of rows.
        self._sums: dict[int, tuple[float, float]] = {}
        self._worth = DraftWorth(step_ms.shape[1] - 1)
        self._search = Search(1, 0)
        self._last_step = (0, 0)
        self._is_drafting = False

    def drafting(self, rows: Sequence[Row]) -> tuple[int, int]:
        costs = self._costs
        self._search = self._worth.next_search(
            len(rows), costs.of(len(rows)), may_try_none=costs.is_corrected
        )
        return self._search.num_rows, self._search.num_nodes

    def cut(self, rows: Sequence[Row], trees: list[TokenTree]) -> list[TokenTree]:
        """At least one draft a row, if there is one: without it the calibration would learn nothing.

        None of a sample: the pass would be as wide for all rows.
        """
        step_ms = self._costs.of(len(rows))
        predicted = np.zeros((len(rows), step_ms.size - 1))
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            calibration = self._calibrations.setdefault(row, RunningCalibration(*self._fitted))
            predicted[index, : len(tree) - 1] = calibration.predict(np.exp(tree.log_probs[1:]))
        self._worth.learn(self._search, predicted[: self._search.num_rows].mean(0), step_ms)
        if self._search.is_sample:
            return [tree.first(0) for tree in trees]
        tokens, ms = self._sums.get(len(rows), (float(len(rows)), float(step_ms[0])))
        value = predicted.sum(0).cumsum() - tokens / ms * (step_ms[1:] - step_ms[0])
        size = int(value.argmax()) + 1
        self._predicted = [
            drafts[: min(size, len(tree) - 1)] for drafts, tree in zip(predicted, trees, strict=True)
        ]
        return [tree.first(size) for tree in trees]

    def update(self, rows: Sequence[Row], num_accepted: Sequence[int]) -> None:
        step_ms = self._costs.of(len(rows))
        tokens, ms = self._sums.get(len(rows), (float(len(rows)), float(step_ms[0])))
        size = max((drafts.size for drafts in self._predicted), default=0)
        expected = len(rows) + sum(float(drafts.sum()) for drafts in self._predicted)
        self._sums[len(rows)] = MEMORY * tokens + expected, MEMORY * ms + float(step_ms[size])
        self._last_step = len(rows), size
        for row, drafts, accepted in zip(rows, self._predicted, num_accepted, strict=False):
            if drafts.size:
                self._calibrations[row].update(drafts, accepted)
        self._predicted = []

    def took(self, ms: float) -> None:
        # A sample's drafts are in the time, not in the step.
        if self._search.is_sample:
            return
        was_drafting, self._is_drafting = self._is_drafting, self._search.num_nodes > 0
        # When drafting begins, the head first reads what was written without it.
        if was_drafting or not self._is_drafting:
            self._costs.add(*self._last_step, ms)
