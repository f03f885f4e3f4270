"""What steps cost in a run: the times measured beforehand, corrected by those that it sees."""

import numpy as np
from numpy.typing import NDArray

# The weight of the steps before in the next one's correction, and how many times too short or too long the
# time measured may be.
MEMORY = 0.9
MOST = 5.0


class StepCosts:
    """Times measured on an idle machine with short texts are all too short under load: longer contexts,
    answers that are sent meanwhile, other processes. It is taken as a time to be added, however wide a
    pass is: one for steps without drafts and one for those with, for about as many rows.
    """

    def __init__(self, step_ms: NDArray[np.float64]):
        """step_ms [B, N+1]: of 1, 2, ..., B rows with 0, 1, ..., N drafts each."""
        self._step_ms = step_ms
        self._more_ms: dict[tuple[int, bool], float] = {}

    def of(self, num_rows: int) -> NDArray[np.float64]:
        """[N+1] milliseconds. What has not been seen takes as much more as what has been."""
        step_ms = self._step_ms[num_rows - 1]
        plain, drafting = (self._more_ms.get((_bucket(num_rows), drafts)) for drafts in (False, True))
        if plain is None and drafting is None:
            return step_ms
        more = np.full(step_ms.size, plain if drafting is None else drafting)
        more[0] = drafting if plain is None else plain
        return np.maximum(step_ms + more, step_ms / MOST)

    @property
    def is_corrected(self) -> bool:
        """Whether any step has been seen."""
        return bool(self._more_ms)

    def add(self, num_rows: int, num_drafts: int, ms: float) -> None:
        """A step of ``num_drafts`` a row took so long."""
        key, measured = (_bucket(num_rows), num_drafts > 0), self._step_ms[num_rows - 1, num_drafts]
        more = min(max(ms, measured / MOST), measured * MOST) - measured
        self._more_ms[key] = MEMORY * self._more_ms.get(key, more) + (1 - MEMORY) * more


def _bucket(num_rows: int) -> int:
    """1, 2, 3 to 4, 5 to 8, ..."""
    return (num_rows - 1).bit_length()
