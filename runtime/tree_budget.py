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

from runtime.calibration import RunningCalibration
from runtime.row import Row
from runtime.step_costs import StepCosts
from runtime.tree import TokenTree

# The weight of a step in the next one's rate, and in what drafts are expected to be worth.
MEMORY = 0.98
WORTH_MEMORY = 0.9
# Drafts searched for beyond as many as have paid so far: the search takes time for each of them.
MORE = 2
# Every so many steps twice as many are searched for, to see whether more pay now.
PROBE_EVERY = 64
# Where none pay, a few rows draft after as many steps, then after twice as many, up to a limit, and what
# their drafts are expected to be worth counts for more than it does every step.
MOST_PATIENCE = 4096
SAMPLE, SAMPLE_MEMORY, CLOSE = 4, 0.5, 2.0
# What a row's first draft is taken to be worth before any has been seen, and every next one in terms of it.
FIRST_WORTH, NEXT_WORTH = 0.8, 0.85


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
        # What a row's first, second, ... draft is worth, on average.
        self._assumed = FIRST_WORTH * NEXT_WORTH ** np.arange(step_ms.shape[1] - 1)
        self._worth = self._assumed
        self._searched = 0
        self._last_step = (0, 0)
        self._since_probe = 0
        self._tries_none = self._samples = False
        self._trial = 0
        self._patience = PROBE_EVERY

    def drafting(self, rows: Sequence[Row]) -> tuple[int, int]:
        step_ms = self._costs.of(len(rows))
        best = int(_rates(self._worth, step_ms).argmax())
        if self._trial:
            self._samples, self._searched, self._trial = False, self._trial, 0
            return len(rows), self._searched
        self._since_probe += 1
        probes = self._since_probe >= (PROBE_EVERY if best else self._patience)
        if probes:
            self._since_probe = 0
        self._samples = probes and not best
        if best:
            self._patience = PROBE_EVERY
            self._searched = min((2 * best if probes else best) + MORE, self._worth.size)
            if probes and self._costs.is_corrected:
                # Every other time a step without drafts, to see what that costs.
                self._tries_none = not self._tries_none
                if self._tries_none:
                    self._searched = 0
        elif probes:
            # As many as would pay best, were they as good as at first assumed.
            self._searched = 1 + int(_rates(self._assumed, step_ms)[1:].argmax())
            return min(SAMPLE, len(rows)), self._searched
        else:
            self._searched = 0
        return len(rows), self._searched

    def cut(self, rows: Sequence[Row], trees: list[TokenTree]) -> list[TokenTree]:
        """At least one draft a row, if there is one: without it the calibration would learn nothing.

        None where a few rows have drafted to see whether it would pay: that pass would be as wide for all.
        """
        predicted = np.zeros((len(rows), self._worth.size))
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            calibration = self._calibrations.setdefault(row, RunningCalibration(*self._fitted))
            predicted[index, : len(tree) - 1] = calibration.predict(np.exp(tree.log_probs[1:]))
        step_ms = self._costs.of(len(rows))
        if self._samples:
            worth = predicted[:SAMPLE].mean(0)
            self._learn(worth, SAMPLE_MEMORY)
            hopeful = _rates(worth, step_ms).argmax() > 0
            self._patience = PROBE_EVERY if hopeful else min(2 * self._patience, MOST_PATIENCE)
            # If it is close, all rows draft once: what that really takes may be less than is thought.
            cheaper = np.append(step_ms[0], step_ms[1:] / CLOSE)
            self._trial = int(_rates(worth, cheaper).argmax())
            return [tree.first(0) for tree in trees]
        self._learn(predicted.mean(0), WORTH_MEMORY)
        tokens, ms = self._sums.get(len(rows), (float(len(rows)), float(step_ms[0])))
        value = predicted.sum(0).cumsum() - tokens / ms * (step_ms[1:] - step_ms[0])
        size = int(value.argmax()) + 1
        self._predicted = [
            drafts[: min(size, len(tree) - 1)] for drafts, tree in zip(predicted, trees, strict=True)
        ]
        return [tree.first(size) for tree in trees]

    def _learn(self, found: NDArray[np.float64], memory: float) -> None:
        """What the drafts searched for in this step are worth."""
        worth, known = self._worth.copy(), slice(self._searched)
        worth[known] = memory * worth[known] + (1 - memory) * found[known]
        # A later draft is never worth more than an earlier one.
        self._worth = np.minimum.accumulate(worth)

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
        if not self._samples:
            self._costs.add(*self._last_step, ms)


def _rates(worth: NDArray[np.float64], step_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens over time of a row's step with 0, 1, ... drafts of this worth."""
    rates: NDArray[np.float64] = (1 + np.append(0.0, worth.cumsum())) / step_ms
    return rates
