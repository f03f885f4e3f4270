"""What drafts have been worth lately, and for how many of them a step should ask the draft head."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# What a row's first draft is taken to be worth before any has been seen, and every next one in terms of it.
FIRST_WORTH, NEXT_WORTH = 0.8, 0.85
# The weight of the steps before in what drafts are worth.
MEMORY = 0.9
# Drafts asked for beyond as many as have paid so far: the search takes time for each of them.
MORE = 2
# Every so many steps twice as many are asked for, to see whether more pay now.
PROBE_EVERY = 64
# Where none pay, a few rows draft after as many steps, then after twice as many, up to a limit; since they
# do so rarely, it counts for more. Where drafts would pay at ``CLOSE`` times the speed, all rows try for
# some steps.
MOST_PATIENCE = 4096
SAMPLE, SAMPLE_MEMORY, CLOSE = 4, 0.5, 1.5
TRIAL_STEPS = 6


@dataclass(frozen=True)
class Search:
    """How many of the first rows draft, and how many drafts each; a sample's are not verified."""

    num_rows: int
    num_nodes: int
    is_sample: bool = False


class DraftWorth:
    """Expected tokens from a row's first, second, ..., Nth draft, of a text or of all that share a batch."""

    def __init__(self, num_nodes: int):
        self._assumed = FIRST_WORTH * NEXT_WORTH ** np.arange(num_nodes)
        self._worth = self._assumed
        self._since_probe = 0
        self._patience = PROBE_EVERY
        self._trial = self._trial_steps = 0
        self._tried_none = False

    def next_search(self, num_rows: int, step_ms: NDArray[np.float64], *, may_try_none: bool) -> Search:
        """What to ask for in the next step.

        step_ms: [N+1], a step of so many rows with 0, 1, ..., N drafts each
        may_try_none: whether to go without drafts now and then, to see what such a step takes
        """
        if self._trial_steps:
            self._trial_steps -= 1
            return Search(num_rows, self._trial)
        most = self._worth.size
        best = int(_rates(self._worth, step_ms).argmax())
        self._since_probe += 1
        probes = self._since_probe >= (PROBE_EVERY if best else self._patience)
        if probes:
            self._since_probe = 0
        if not best and not probes:
            return Search(num_rows, 0)
        if not best:
            # A sample, of as many as would pay best, were they as good as at first assumed.
            hoped = 1 + int(_rates(self._assumed, step_ms)[1:].argmax())
            return Search(min(SAMPLE, num_rows), hoped, is_sample=True)
        self._patience = PROBE_EVERY
        if probes and may_try_none:
            self._tried_none = not self._tried_none
            if self._tried_none:
                return Search(num_rows, 0)
        return Search(num_rows, min((2 * best if probes else best) + MORE, most))

    def learn(self, search: Search, found: NDArray[np.float64], step_ms: NDArray[np.float64]) -> None:
        """found [N]: what the drafts that were asked for are expected to give, the mean of the rows."""
        memory = SAMPLE_MEMORY if search.is_sample else MEMORY
        worth, known = self._worth.copy(), slice(search.num_nodes)
        worth[known] = memory * worth[known] + (1 - memory) * found[known]
        # A later draft is never worth more than an earlier one.
        self._worth = np.minimum.accumulate(worth)
        if search.is_sample:
            pays = _rates(found, step_ms).argmax() > 0
            self._patience = PROBE_EVERY if pays else min(2 * self._patience, MOST_PATIENCE)
            # What drafting really takes may be less than is thought: it is seen when all rows draft.
            cheaper = np.append(step_ms[0], step_ms[1:] / CLOSE)
            self._trial = int(_rates(found, cheaper).argmax())
            self._trial_steps = TRIAL_STEPS if self._trial else 0


def _rates(worth: NDArray[np.float64], step_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens over time of a row's step with 0, 1, ... drafts of this worth."""
    rates: NDArray[np.float64] = (1 + np.append(0.0, worth.cumsum())) / step_ms
    return rates
