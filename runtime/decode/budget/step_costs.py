"""What steps cost in a run: the times measured beforehand, corrected by those recorded in the run."""

import numpy as np
from numpy.typing import NDArray

from runtime.decode.budget.constants import BudgetConstants


class StepCosts:
    """Times measured on an idle machine with short texts are too short under load: contexts are longer,
    answers are sent meanwhile, other processes run. The difference is taken as a time to be added, whatever
    the size of the trees: one for steps without drafts and one for steps with drafts, for each power of two
    of sequences.
    """

    def __init__(self, step_ms: NDArray[np.float64], constants: BudgetConstants):
        """step_ms [B, N+1]: a step of 1, 2, ..., B sequences with 0, 1, ..., N draft nodes each."""
        self._step_ms = step_ms
        self._constants = constants
        self._extra_ms: dict[tuple[int, bool], float] = {}

    def of(self, num_seqs: int) -> NDArray[np.float64]:
        """[N+1] milliseconds. A kind of step not recorded yet takes as much more as the other kind."""
        step_ms = self._step_ms[num_seqs - 1]
        plain, drafting = (self._extra_ms.get((_bucket(num_seqs), drafts)) for drafts in (False, True))
        if plain is None and drafting is None:
            return step_ms
        extra = np.full(step_ms.size, plain if drafting is None else drafting)
        extra[0] = drafting if plain is None else plain
        return np.maximum(step_ms + extra, step_ms / self._constants.max_time_factor)

    def record(self, num_seqs: int, num_nodes: int, ms: float) -> None:
        """A step of ``num_nodes`` draft nodes for each sequence took ``ms`` milliseconds."""
        factor, memory = self._constants.max_time_factor, self._constants.time_memory
        key, measured = (_bucket(num_seqs), num_nodes > 0), self._step_ms[num_seqs - 1, num_nodes]
        extra = min(max(ms, measured / factor), measured * factor) - measured
        self._extra_ms[key] = memory * self._extra_ms.get(key, extra) + (1 - memory) * extra


def _bucket(num_seqs: int) -> int:
    """Equal for 1, for 2, for 3 to 4, for 5 to 8, ..."""
    return (num_seqs - 1).bit_length()
