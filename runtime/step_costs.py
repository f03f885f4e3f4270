"""What steps cost in a run: the times measured beforehand, corrected by those that it sees."""

import numpy as np
from numpy.typing import NDArray

# The weight of the steps before in the next one's correction, and how far a single step may be off.
MEMORY = 0.9
MOST = 5.0


class StepCosts:
    """Times measured on an idle machine with short texts are all too short under load, those of steps with
    drafts and without by different factors: longer contexts, answers that are sent meanwhile, other
    processes. One factor of each kind for about as many rows.
    """

    def __init__(self, step_ms: NDArray[np.float64]):
        """step_ms [B, N+1]: of 1, 2, ..., B rows with 0, 1, ..., N drafts each."""
        self._step_ms = step_ms
        self._factors: dict[tuple[int, bool], float] = {}

    def of(self, num_rows: int) -> NDArray[np.float64]:
        """[N+1] milliseconds. What has not been seen is off as much as what has been."""
        step_ms = self._step_ms[num_rows - 1]
        plain, drafting = (self._factors.get((_bucket(num_rows), drafts)) for drafts in (False, True))
        if plain is None and drafting is None:
            return step_ms
        factors = np.full(step_ms.size, drafting or plain)
        factors[0] = plain or drafting
        found: NDArray[np.float64] = step_ms * factors
        return found

    @property
    def is_corrected(self) -> bool:
        """Whether any step has been seen."""
        return bool(self._factors)

    def add(self, num_rows: int, num_drafts: int, ms: float) -> None:
        """A step of ``num_drafts`` a row took so long."""
        key = _bucket(num_rows), num_drafts > 0
        factor = min(max(ms / self._step_ms[num_rows - 1, num_drafts], 1 / MOST), MOST)
        self._factors[key] = MEMORY * self._factors.get(key, factor) + (1 - MEMORY) * factor


def _bucket(num_rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ..."""
    return (num_rows - 1).bit_length()
