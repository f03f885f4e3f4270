"""How many drafts a step verifies: as many as pay for themselves.

Decoding is fastest where tokens over time are, over the whole text. A ratio of sums is maximised by
taking in every step the size n with the largest

    E(n) - rate * cost(n),      E(n) = 1 + psi'_1 + ... + psi'_n

(Dinkelbach, 1967): psi' are the best drafts' calibrated probabilities, so E(n) is the expected number of
tokens, and cost(n) the time of a step of n drafts on this machine. The rate is that of the text so far.
"""

import numpy as np
from numpy.typing import NDArray

from runtime.calibration import RunningCalibration

# The weight of a step in the next one's rate.
MEMORY = 0.98


class TreeBudget:
    """What choosing needs to know before a text begins.

    step_ms: [N+1] float64, a step with 0, 1, ..., N drafts; calibration: of the draft head, None as stated
    """

    def __init__(self, step_ms: NDArray[np.float64], calibration: tuple[float, float] | None):
        self.step_ms = step_ms
        self._calibration = calibration or (1.0, 0.0)

    @property
    def num_nodes(self) -> int:
        """Drafts a step may have at most."""
        return self.step_ms.size - 1

    def start(self) -> "RunningBudget":
        """The budget of one text."""
        return RunningBudget(self.step_ms, RunningCalibration(*self._calibration))


class RunningBudget:
    """One text's budget: call ``choose`` and ``update`` in turns."""

    def __init__(self, step_ms: NDArray[np.float64], calibration: RunningCalibration):
        self._step_ms = step_ms
        self._calibration = calibration
        self._predicted = np.empty(0)
        # Forgetful sums, which begin as plain decoding.
        self._tokens, self._ms = 1.0, float(step_ms[0])

    def choose(self, log_probs: NDArray[np.float64]) -> int:
        """log_probs [M], best first -> how many of the drafts to verify.

        At least one, if there is one: without it the calibration would learn nothing any more.
        """
        predicted = self._calibration.predict(np.exp(log_probs))
        gain = predicted.cumsum() - self._tokens / self._ms * (
            self._step_ms[1 : predicted.size + 1] - self._step_ms[0]
        )
        size = int(gain.argmax()) + 1 if gain.size else 0
        self._predicted = predicted[:size]
        self._tokens = MEMORY * self._tokens + 1 + float(self._predicted.sum())
        self._ms = MEMORY * self._ms + float(self._step_ms[size])
        return size

    def update(self, num_accepted: int) -> None:
        """How many of the chosen drafts were accepted."""
        if self._predicted.size:
            self._calibration.update(self._predicted, num_accepted)
