"""Costs of steps that a test records and reads one by one; a budget does so in its compiled rules."""

import numpy as np
from numpy.typing import NDArray

from runtime.decode.step_costs import StepCosts, record_step


def corrected_ms(costs: StepCosts, num_seqs: int) -> NDArray[np.float64]:
    """[N+1] milliseconds. The array follows what is recorded of steps of as many sequences."""
    corrected: NDArray[np.float64] = costs.records(num_seqs)[0]["corrected"][0, : costs.max_nodes + 1]
    return corrected


class RecordedCosts(StepCosts):
    def of(self, num_seqs: int) -> NDArray[np.float64]:
        return corrected_ms(self, num_seqs)

    def record(self, num_seqs: int, num_nodes: int, ms: float, draft_ms: float = 0.0) -> None:
        """A step of ``num_nodes`` draft nodes for each sequence took ``ms`` milliseconds, with its draft."""
        times, shown = self.records(num_seqs)
        record_step(times[0], shown[0], num_nodes, ms, draft_ms)
        self.forget_others(num_seqs)
