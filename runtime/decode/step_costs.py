"""What decode steps cost: as measured when a decoder is loaded, corrected by the times of real steps."""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray


@dataclass(frozen=True)
class CostConstants:
    """Chosen with the shipped models on 2 CPU cores.

    time_memory, drafted_memory: weight of the past in the correction of the times of plain steps, about ten
        of them, and of steps with drafts, about thirty, to which a line is fitted.
    slope_prior: the line's slope is as if the numbers of nodes had this much more variance and no slope in
        it, so that steps of nearly equal sizes do not give a wild one.
    beside_memory, beside_prior, beside_first_steps: weight of the past in how far a number of nodes is from
        the line, about five hundred steps, since stairs stay where they are; as how many steps that were on
        the line it begins; and after how many steps of all sizes it is learned.
    max_time_factor: a step's recorded time counts as at most so many times longer or shorter than it was
        believed to be, so that one descheduled step does not change the choice.
    max_correction: a corrected time is at least the measured one divided by this.
    least_difference: a plain step is taken to be shorter than a step with one draft, by at least this share
        of the difference that was measured at loading.
    """

    time_memory: float = 0.9
    drafted_memory: float = 0.97
    slope_prior: float = 2.0
    beside_memory: float = 0.998
    beside_prior: float = 16.0
    beside_first_steps: float = 5.0
    max_time_factor: float = 1.5
    max_correction: float = 5.0
    least_difference: float = 0.5


DEFAULT_CONSTANTS = CostConstants()


class StepCosts:
    """Milliseconds of steps: those measured when a decoder is loaded, corrected by those of real steps.

    Times measured at loading are noisy, and of an idle machine with short texts: contexts are longer, answers
    are sent meanwhile, other processes run. They are also a smooth curve, and real times have stairs, because
    a matrix product computes rows in groups (of 4 to 12 on a CPU). So each power of two of sequences has
    times to be added: a fading mean for steps without drafts, and for steps with drafts a line over the
    number of nodes, fitted to fading sums, with what is left of each number of nodes.

    While all steps draft, no plain step is recorded. If the machine was slow when plain steps were measured,
    they would seem slow for ever. So a plain step is taken to last no longer than a step with drafts does
    without the time of its draft.
    """

    def __init__(self, step_ms: NDArray[np.float64], constants: CostConstants = DEFAULT_CONSTANTS):
        """step_ms: [B, N+1] float64, a step of 1, 2, ..., B sequences with 0, 1, ..., N draft nodes each; a
        step with 0 nodes leaves the draft head out
        """
        self.max_nodes = step_ms.shape[1] - 1
        self._step_ms = step_ms
        self._constants = constants
        self._extras: dict[int, _ExtraTimes] = {}
        # What ``of`` returned since the last record.
        self._corrected: dict[int, NDArray[np.float64]] = {}

    def of(self, num_seqs: int) -> NDArray[np.float64]:
        """[N+1] milliseconds. A kind of step not recorded yet takes as much more as the other kind."""
        if num_seqs not in self._corrected:
            step_ms, extra = self._step_ms[num_seqs - 1], self._extras.get(_bucket(num_seqs))
            self._corrected[num_seqs] = step_ms if extra is None else extra.add(step_ms)
        return self._corrected[num_seqs]

    def with_draft(self, num_seqs: int) -> NDArray[np.float64]:
        """As ``of``, but a step with 0 nodes has drafted and verifies none of the drafts.

        That takes as long as a plain step and a draft, and for ever until the time of a draft is known.
        """
        step_ms = self.of(num_seqs).copy()
        extra = self._extras.get(_bucket(num_seqs))
        step_ms[0] += np.inf if extra is None else extra.draft_ms
        return step_ms

    def record(self, num_seqs: int, num_nodes: int, ms: float, draft_ms: float = 0.0) -> None:
        """A step of ``num_nodes`` draft nodes for each sequence took ``ms`` milliseconds.

        draft_ms: of these, those of making the draft, as in ``StepResult``
        """
        factor, bucket = self._constants.max_time_factor, _bucket(num_seqs)
        believed = float(self.of(num_seqs)[num_nodes])
        if bucket not in self._extras:
            self._extras[bucket] = _ExtraTimes(self.max_nodes, self._constants)
        if draft_ms:
            self._extras[bucket].record_draft(draft_ms)
        if not num_nodes:
            # Without its draft it was a plain step.
            ms -= draft_ms
        counted = min(max(ms, believed / factor), believed * factor)
        undrafted = counted * (1 - draft_ms / ms) if ms else counted
        step_ms = self._step_ms[num_seqs - 1]
        extra = counted - float(step_ms[num_nodes])
        self._extras[bucket].record(num_nodes, extra, undrafted - float(step_ms[0]))
        self._corrected.clear()


class _ExtraTimes:
    """How many milliseconds more than measured steps take, by the number of draft nodes."""

    def __init__(self, max_nodes: int, constants: CostConstants):
        self._constants = constants
        # Milliseconds of a draft, a fading mean; infinite until one is recorded.
        self.draft_ms = np.inf
        self._plain: float | None = None
        # Of steps with n nodes that took x ms more: 1, n, n * n, x, n * x; x without what a number of nodes
        # takes beside the line.
        self._line_sums = np.zeros(5)
        # Of the same steps: how many milliseconds more than a plain step they took without their drafts.
        self._undrafted_sum = 0.0
        # By the number of nodes: how far steps were from the line, and how many there were.
        self._beside_sums = np.zeros(max_nodes + 1)
        self._beside_counts = np.zeros(max_nodes + 1)

    def add(self, step_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """[N+1] corrected milliseconds of steps that were measured to take ``step_ms``."""
        constants, sums, plain = self._constants, self._line_sums, self._plain
        if not sums[0]:
            assert plain is not None
            sums = np.array([1.0, 0.0, 0.0, plain, 0.0])
        if plain is None:
            plain = float(sums[3] / sums[0])
        if self._line_sums[0]:
            plain = min(plain, self._undrafted_sum / self._line_sums[0])
        corrected: NDArray[np.float64] = _add_extra(
            step_ms,
            self._beside(),
            plain,
            sums,
            constants.slope_prior,
            constants.max_correction,
            constants.least_difference,
        )
        return corrected

    def record_draft(self, ms: float) -> None:
        """A draft took ``ms`` milliseconds."""
        memory = self._constants.drafted_memory
        before = self.draft_ms if np.isfinite(self.draft_ms) else ms
        counted = min(ms, before * self._constants.max_time_factor)
        self.draft_ms = memory * before + (1 - memory) * counted

    def record(self, num_nodes: int, extra: float, undrafted_extra: float) -> None:
        """undrafted_extra: how much more than a plain step the step took without its draft"""
        constants = self._constants
        if not num_nodes:
            memory = constants.time_memory
            before = extra if self._plain is None else self._plain
            self._plain = memory * before + (1 - memory) * extra
            return
        on_line = extra - float(self._beside()[num_nodes])
        # The first steps mostly show how far the whole line is off.
        if self._line_sums[0] > constants.beside_first_steps:
            memory = constants.beside_memory
            self._beside_sums *= memory
            self._beside_counts *= memory
            line = _line_at(self._line_sums, constants.slope_prior, num_nodes)
            self._beside_sums[num_nodes] += extra - line
            self._beside_counts[num_nodes] += 1
        _add_to_line(self._line_sums, constants.drafted_memory, num_nodes, on_line)
        self._undrafted_sum = constants.drafted_memory * self._undrafted_sum + undrafted_extra

    def _beside(self) -> NDArray[np.float64]:
        """[N+1] milliseconds beside the line: means that begin as 0 and move slowly."""
        found: NDArray[np.float64] = self._beside_sums / (self._beside_counts + self._constants.beside_prior)
        return found


def _bucket(num_seqs: int) -> int:
    """Equal for 1, for 2, for 3 to 4, for 5 to 8, ..."""
    return (num_seqs - 1).bit_length()


# Compiled, because every step asks for it.


@njit(cache=True)
def _add_extra(
    step_ms: NDArray[np.float64],
    beside: NDArray[np.float64],
    plain: float,
    sums: NDArray[np.float64],
    slope_prior: float,
    max_correction: float,
    least_difference: float,
) -> NDArray[np.float64]:
    """Step times [N+1] with what they take more, by a line for those with drafts (``StepCosts``).

    More nodes never take less, and plain steps less than those with one node, by a share of the measured
    difference at least: on a device nothing else says what a draft takes.
    """
    found = np.empty_like(step_ms)
    found[0] = step_ms[0] + plain
    for nodes in range(1, step_ms.size):
        extra = _line_at(sums, slope_prior, nodes) + beside[nodes]
        found[nodes] = max(step_ms[nodes] + extra, step_ms[nodes] / max_correction)
        if nodes > 1:
            found[nodes] = max(found[nodes], found[nodes - 1])
    if step_ms.size > 1:
        found[0] = min(found[0], found[1] - least_difference * (step_ms[1] - step_ms[0]))
    found[0] = max(found[0], step_ms[0] / max_correction)
    return found


@njit(cache=True)
def _add_to_line(sums: NDArray[np.float64], memory: float, nodes: int, extra: float) -> None:
    """Let fading sums follow a step with ``nodes`` draft nodes."""
    sums[0] = memory * sums[0] + 1
    sums[1] = memory * sums[1] + nodes
    sums[2] = memory * sums[2] + nodes * nodes
    sums[3] = memory * sums[3] + extra
    sums[4] = memory * sums[4] + nodes * extra


@njit(cache=True)
def _line_at(sums: NDArray[np.float64], slope_prior: float, nodes: int) -> float:
    """The fitted line's milliseconds at a number of nodes."""
    mean_nodes, mean_extra = sums[1] / sums[0], sums[3] / sums[0]
    variance = sums[2] / sums[0] - mean_nodes * mean_nodes
    slope = (sums[4] / sums[0] - mean_nodes * mean_extra) / (variance + slope_prior)
    extra: float = mean_extra + slope * (nodes - mean_nodes)
    return extra
