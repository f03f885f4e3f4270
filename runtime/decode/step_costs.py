"""What decode steps cost: as measured when a decoder is loaded, corrected by the times of real steps."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

# A step calls few compiled functions with few arguments, because after a pass the processor's caches are full
# of a model's weights, and every function and every array that is touched has to come from memory. So numbers
# go to them as records. Fields of a record are taken by index, which works without a compiler too.
Record = Any


def record_type(constants: type) -> np.dtype[np.void]:
    """The type of a record with the floats of a dataclass."""
    return np.dtype([(field.name, np.float64) for field in fields(constants) if field.type is float])


def as_record(constants: Any) -> NDArray[np.void]:
    """The floats of a dataclass's instance as an array of one record."""
    kind = record_type(type(constants))
    return np.array([tuple(getattr(constants, name) for name in kind.names or ())], kind)


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

# Draft nodes of a step whose time is known, at most.
MAX_NODES = 32
BY_NODES = (np.float64, (MAX_NODES + 1,))
# Milliseconds of steps of so many sequences with 0, 1, ..., ``max_nodes`` draft nodes, as measured at loading
# and as of now.
TIMES = np.dtype([("max_nodes", np.int64), ("measured", *BY_NODES), ("corrected", *BY_NODES)])
# What real steps of about as many sequences have shown, in fading sums and means:
# draft_ms: milliseconds of a draft; infinite until one is recorded
# plain: how many milliseconds more than measured a plain step takes; NaN until one is recorded
# undrafted_sum: of steps with drafts: how many more than a plain step they took without their drafts
# line_sums: of the same steps with n nodes that took x ms more: 1, n, n * n, x, n * x; x without what a
#     number of nodes takes beside the line
# beside_sums, beside_counts: by the number of nodes, how far steps were from the line, and how many there
#     were
SHOWN = np.dtype(
    [
        ("constants", record_type(CostConstants)),
        ("draft_ms", np.float64),
        ("plain", np.float64),
        ("undrafted_sum", np.float64),
        ("line_sums", np.float64, (5,)),
        ("beside_sums", *BY_NODES),
        ("beside_counts", *BY_NODES),
    ]
)


class StepCosts:
    """Milliseconds of steps.

    Times measured at loading are noisy, and of an idle machine with short texts. Of most numbers of nodes
    they are only on a line between two that were measured, and real times have stairs, because a matrix
    product computes rows in groups (of 4 to 12 on a CPU). So each power of two of sequences has times to be
    added: a fading mean for steps without drafts, and for steps with drafts a line over the number of nodes,
    fitted to fading sums, with what is left of each number of nodes.

    While all steps draft, no plain step is recorded. If the machine was slow when plain steps were measured,
    they would seem slow for ever. So a plain step is taken to last no longer than a step with drafts does
    without the time of its draft.
    """

    def __init__(self, step_ms: NDArray[np.float64], constants: CostConstants = DEFAULT_CONSTANTS):
        """step_ms: [B, N+1] float64, a step of 1, 2, ..., B sequences with 0, 1, ..., N draft nodes each; a
        step with 0 nodes leaves the draft head out. N is at most MAX_NODES.
        """
        self.max_nodes = step_ms.shape[1] - 1
        self._step_ms = step_ms
        self._constants = constants
        # ``SHOWN`` [1] by the power of two of sequences, and ``TIMES`` [1] by their number.
        self._shown: dict[int, NDArray[np.void]] = {}
        self._times: dict[int, NDArray[np.void]] = {}

    def records(self, num_seqs: int) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """``TIMES`` [1] and ``SHOWN`` [1], for ``record_step``; call ``forget_others`` after it.

        A kind of step that was not recorded yet takes as much more than measured as the other kind.
        """
        bucket = (num_seqs - 1).bit_length()  # equal for 1, for 2, for 3 to 4, for 5 to 8, ...
        if num_seqs not in self._times:
            if bucket not in self._shown:
                shown = self._shown[bucket] = np.zeros(1, SHOWN)
                shown["constants"] = as_record(self._constants)
                shown["draft_ms"], shown["plain"] = np.inf, np.nan
            times = self._times[num_seqs] = np.zeros(1, TIMES)
            times["max_nodes"] = self.max_nodes
            times["measured"][0, : self.max_nodes + 1] = self._step_ms[num_seqs - 1]
            _correct(times[0], self._shown[bucket][0])
        return self._times[num_seqs], self._shown[bucket]

    def forget_others(self, num_seqs: int) -> None:
        """A step of ``num_seqs`` sequences was recorded: the corrections of others are out of date."""
        if len(self._times) > 1:
            self._times = {num_seqs: self._times[num_seqs]}


@njit(cache=True)
def record_step(times: Record, shown: Record, num_nodes: int, ms: float, draft_ms: float) -> None:
    """Learn from a step with so many draft nodes for each sequence, and correct the times.

    ms: what it took; draft_ms: of these, those of making the draft, as in ``StepResult``
    """
    constants = shown["constants"]
    factor, believed = constants["max_time_factor"], times["corrected"][num_nodes]
    if draft_ms:
        before = shown["draft_ms"] if np.isfinite(shown["draft_ms"]) else draft_ms
        counted = min(draft_ms, before * factor)
        shown["draft_ms"] = constants["drafted_memory"] * before + (1 - constants["drafted_memory"]) * counted
    if not num_nodes:
        # Without its draft it was a plain step.
        ms -= draft_ms
    counted = min(max(ms, believed / factor), believed * factor)
    extra = counted - times["measured"][num_nodes]
    if num_nodes:
        undrafted = counted * (1 - draft_ms / ms) if ms else counted
        _follow_drafted(times, shown, num_nodes, extra, undrafted - times["measured"][0])
    else:
        before = extra if np.isnan(shown["plain"]) else shown["plain"]
        shown["plain"] = constants["time_memory"] * before + (1 - constants["time_memory"]) * extra
    _correct(times, shown)


@njit(cache=True)
def _follow_drafted(
    times: Record, shown: Record, num_nodes: int, extra: float, undrafted_extra: float
) -> None:
    """Let the line and the times beside it follow a step with drafts.

    extra: how much more it took than was measured; undrafted_extra: than a plain step, without its draft
    """
    constants, sums = shown["constants"], shown["line_sums"]
    on_line = extra - _beside_at(shown, num_nodes)
    # The first steps mostly show how far the whole line is off.
    if sums[0] > constants["beside_first_steps"]:
        for nodes in range(1, times["max_nodes"] + 1):
            shown["beside_sums"][nodes] *= constants["beside_memory"]
            shown["beside_counts"][nodes] *= constants["beside_memory"]
        shown["beside_sums"][num_nodes] += extra - _line_at(shown, num_nodes)
        shown["beside_counts"][num_nodes] += 1
    memory = constants["drafted_memory"]
    sums[0] = memory * sums[0] + 1
    sums[1] = memory * sums[1] + num_nodes
    sums[2] = memory * sums[2] + num_nodes * num_nodes
    sums[3] = memory * sums[3] + on_line
    sums[4] = memory * sums[4] + num_nodes * on_line
    shown["undrafted_sum"] = memory * shown["undrafted_sum"] + undrafted_extra


@njit(cache=True)
def _correct(times: Record, shown: Record) -> None:
    """Write the corrected times: what was measured and what is taken more, by the line for steps with drafts.

    More nodes never take less, and plain steps less than those with one node, by a share of the measured
    difference at least: on a device nothing else says what a draft takes.
    """
    constants, measured, corrected = shown["constants"], times["measured"], times["corrected"]
    plain, count = 0.0 if np.isnan(shown["plain"]) else shown["plain"], shown["line_sums"][0]
    if count:
        if np.isnan(shown["plain"]):
            plain = shown["line_sums"][3] / count
        plain = min(plain, shown["undrafted_sum"] / count)
    corrected[0] = measured[0] + plain
    for nodes in range(1, times["max_nodes"] + 1):
        extra = (_line_at(shown, nodes) if count else plain) + _beside_at(shown, nodes)
        corrected[nodes] = max(measured[nodes] + extra, measured[nodes] / constants["max_correction"])
        if nodes > 1:
            corrected[nodes] = max(corrected[nodes], corrected[nodes - 1])
    if times["max_nodes"]:
        difference = constants["least_difference"] * (measured[1] - measured[0])
        corrected[0] = min(corrected[0], corrected[1] - difference)
    corrected[0] = max(corrected[0], measured[0] / constants["max_correction"])


@njit(cache=True)
def _beside_at(shown: Record, nodes: int) -> float:
    """The milliseconds beside the line of a number of nodes: a mean that begins as 0 and moves slowly."""
    found: float = shown["beside_sums"][nodes] / (
        shown["beside_counts"][nodes] + shown["constants"]["beside_prior"]
    )
    return found


@njit(cache=True)
def _line_at(shown: Record, nodes: int) -> float:
    """The fitted line's milliseconds at a number of nodes."""
    sums = shown["line_sums"]
    mean_nodes, mean_extra = sums[1] / sums[0], sums[3] / sums[0]
    variance = sums[2] / sums[0] - mean_nodes * mean_nodes
    slope = (sums[4] / sums[0] - mean_nodes * mean_extra) / (variance + shown["constants"]["slope_prior"])
    extra: float = mean_extra + slope * (nodes - mean_nodes)
    return extra
