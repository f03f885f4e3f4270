"""The rules by which ``runtime.decode.budget.AdaptiveBudget`` chooses, compiled; explanations are there."""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.calibration import RUNNING, calibrate_logs, follow_accepted
from runtime.decode.step_costs import MAX_NODES, Record, record_step, record_type


@dataclass(frozen=True)
class BudgetConstants:
    """Chosen on 2 CPU cores with the demo model and SmolLM2-135M-Instruct; docs/performance.md has tables.

    first_gain, next_gain, most_next_gain: the assumed gain of a sequence's first draft node before any has
        been seen, and the gain of every further node as a share of the one before. For nodes that a step has
        not drafted the share is that of the last drafted node, kept between ``next_gain`` and
        ``most_next_gain``. The demo's head begins with about 0.8 on GSM8K; with SmolLM2's a further node
        gives about two thirds of the one before.
    first_weight: as how many drafted steps the assumed gains and the first worth count. With 2, a useless
        head is found out within a few steps.
    gain_memory: weight of the past in the marginal gains after a drafted step: 0.9 averages about ten.
    first_worth, worth_memory: the worth in tokens that is assumed before any step has drafted, or less where
        not even the assumed gains reach it; and the weight of the past in it after a drafted step. Whether
        drafts pay depends on the text as a whole more than on its last ten steps: with a memory of 0.9, code
        was decoded without drafts that would have paid. A step of B sequences counts as B drafted steps.
    accepted_share: how far the worth follows what was accepted in place of what was expected, which varies
        less but may be wrong for a text.
    rate_memory, first_steps: weight of the past in the rate, which follows about fifty steps, and of how many
        plain steps the first rate consists.
    unseen_memory, early_trials: weight of the past in the worth after a plain step, which shows nothing of
        it, where the head is trusted; after n sequences that had drafts it rises 1 + early_trials / n times
        as fast, since few drafts say little. So in the long run trials of a head that gives nothing cost up
        to (1 - unseen_memory) / (1 - worth_memory) * first_worth = 0.03 tokens a step.
    useless_acceptance: the probability with which a draft of a useless head is accepted
    usual_doubt, max_doubt: the least and the largest doubt with which a text begins. Even the largest leaves
        a text one try at once where a node pays if three in ten are accepted.
    changed: share by which the doubt goes back to the usual one after every step: by half in 140 steps
    past_memory: weight of the past in the mean doubt of past texts after a step, which follows fifty steps
    verified_nodes: sizes among which ``num_verified`` chooses; each has tensors of its own to bind. The
        larger ones make passes of 8, 12 and 16 rows, which products on a CPU compute in whole groups.
    """

    first_gain: float = 0.8
    next_gain: float = 0.7
    most_next_gain: float = 0.95
    first_weight: float = 2.0
    gain_memory: float = 0.9
    first_worth: float = 0.5
    worth_memory: float = 0.95
    accepted_share: float = 0.3
    rate_memory: float = 0.98
    first_steps: float = 5.0
    unseen_memory: float = 0.997
    early_trials: float = 40.0
    useless_acceptance: float = 0.05
    usual_doubt: float = 0.02
    max_doubt: float = 0.7
    changed: float = 0.005
    past_memory: float = 0.98
    verified_nodes: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 11, 15)


DEFAULT_CONSTANTS = BudgetConstants()

SIZES = (np.int64, (MAX_NODES,))
# What a budget knows of a run.
# num_gains, gains: what a sequence is expected to accept of its i-th best node
# drafted_sizes, verified_sizes: numbers of nodes that a step may draft and may verify, ascending
# num_drafted, num_verified: of the last step; nodes of each sequence
# has_chosen: whether the number of verified nodes was chosen, after the draft
# believed_ms, expected_gain: how long the last step was believed to take, and how many drafts a sequence was
#     expected to accept
# num_drafted_steps, num_samples: the steps that drafted, and the sequences that had drafts in them
KNOWN = np.dtype(
    [
        ("constants", record_type(BudgetConstants)),
        ("calibration", RUNNING),
        ("doubt", np.float64),
        ("num_gains", np.int64),
        ("gains", np.float64, (MAX_NODES,)),
        ("num_drafted_sizes", np.int64),
        ("drafted_sizes", *SIZES),
        ("num_verified_sizes", np.int64),
        ("verified_sizes", *SIZES),
        ("num_drafted", np.int64),
        ("num_verified", np.int64),
        ("has_chosen", np.bool_),
        ("believed_ms", np.float64),
        ("expected_gain", np.float64),
        ("num_drafted_steps", np.int64),
        ("num_samples", np.int64),
    ]
)
# Of steps of so many sequences: the worth of one that drafts, and the tokens and milliseconds of all, which
# are fading sums; all 0 before the first.
RATES = np.dtype([("worth", np.float64), ("tokens", np.float64), ("ms", np.float64)])
# What is known of past texts.
# doubt: the mean of the doubt over their steps
# num_drafted, gain_sums: the steps that drafted, and what a sequence was then expected to accept of its i-th
#     best node; fading sums
PAST = np.dtype([("doubt", np.float64), ("num_drafted", np.float64), ("gain_sums", np.float64, (MAX_NODES,))])

# A step calls ``choose_verified`` and ``end_step``, and before them ``begin_step`` if it has another number
# of sequences than the last one. They take arrays of one record: ``KNOWN``, ``RATES``, ``PAST``, and
# ``TIMES`` and ``SHOWN`` of ``runtime.decode.step_costs``. The other functions take the records.


@njit(cache=True)
def begin_step(known: NDArray[np.void], rates: NDArray[np.void], times: NDArray[np.void]) -> int:
    """Choose how many nodes the next step drafts for each of its sequences."""
    return _begin(known[0], rates[0], times[0])


@njit(cache=True)
def choose_verified(
    known: NDArray[np.void],
    rates: NDArray[np.void],
    times: NDArray[np.void],
    shown: NDArray[np.void],
    log_probs: NDArray[np.float64],
) -> int:
    """Choose how many drafts, whose log probabilities are [B, N], are worth the time to verify them."""
    run, corrected = known[0], times[0]["corrected"]
    found = _expected(run, calibrate_logs(run["calibration"], log_probs))
    _follow_gains(run, found, log_probs.shape[0])
    best, best_gain, best_worth = 0, 0.0, -np.inf
    if found.size:
        best, best_gain, gains = 1, found[0], np.cumsum(found)
        rate = rates[0]["tokens"] / rates[0]["ms"]
        for size in run["verified_sizes"][: run["num_verified_sizes"]]:
            if size > found.size:
                break
            gain = gains[size - 1] if size else 0.0
            worth = gain - rate * (corrected[size] if size else corrected[0] + shown[0]["draft_ms"])
            if worth > best_worth:
                best, best_gain, best_worth = size, gain, worth
    run["num_verified"], run["has_chosen"], run["expected_gain"] = best, True, best_gain
    run["believed_ms"] = corrected[best] if best else corrected[0] + shown[0]["draft_ms"]
    return best


@njit(cache=True)
def end_step(
    known: NDArray[np.void],
    rates: NDArray[np.void],
    times: NDArray[np.void],
    shown: NDArray[np.void],
    past: NDArray[np.void],
    log_probs: NDArray[np.float64],
    counts: NDArray[np.int64],
    unverified_are_right: NDArray[np.bool_],
    draft_ms: float,
    ms: float,
) -> int:
    """Learn from a step, and begin one of as many sequences, as ``begin_step``.

    log_probs: [B, N], of the verified drafts, or of the first ones [B, 1] if none was verified
    counts: [B], the tokens of each sequence
    unverified_are_right: [B], whether first drafts that were not verified were right; otherwise empty
    draft_ms, ms: what the draft and the whole step took; 0 where that was not measured
    """
    run, rate, constants = known[0], rates[0], known[0]["constants"]
    if run["num_drafted"]:
        predicted = calibrate_logs(run["calibration"], log_probs)
        if run["has_chosen"]:
            _follow_worth(run, rate, times[0], counts)
        else:
            # The number was fixed before the draft, so the worth is that of the best fixed number.
            found = _expected(run, predicted)
            _follow_gains(run, found, counts.size)
            _follow_rate(run, rate, found.sum())
            rate["worth"] = _most_worth(run, rate, times[0], is_certain=False)
        verified = not unverified_are_right.size
        are_right = counts > 1 if verified else unverified_are_right
        num_right = (counts - 1).sum() if verified else unverified_are_right.sum()
        follow_accepted(run["calibration"], predicted.ravel(), num_right)
        if predicted.size:
            follow_first_drafts(run, predicted[:, 0], are_right)
        _remember_gains(run, past[0])
    else:
        _follow_rate(run, rate, 0.0)
        # The square makes trials of a useless head rarer than the probability alone.
        share = (1 - constants["unseen_memory"]) * (1 - run["doubt"]) ** 2
        if run["num_samples"]:
            share *= 1 + constants["early_trials"] / run["num_samples"]
        rate["worth"] += share * (_most_worth(run, rate, times[0], is_certain=True) - rate["worth"])
    forget_doubt(run, past[0])
    # The first step that drafts also reads the prompt with the head: others take no longer.
    if ms and (run["num_drafted_steps"] > 1 or not run["num_drafted"] or ms < run["believed_ms"]):
        record_step(times[0], shown[0], run["num_verified"], ms, draft_ms)
    return _begin(run, rate, times[0])


@njit(cache=True)
def _begin(run: Record, rates: Record, times: Record) -> int:
    """No nodes, or the number with the most tokens for each millisecond."""
    step_ms = times["corrected"]
    if not rates["ms"]:
        # Nothing is known of such steps: the rate begins as that of plain ones.
        rates["tokens"] = run["constants"]["first_steps"]
        rates["ms"] = rates["tokens"] * step_ms[0]
        rates["worth"] = _most_worth(run, rates, times, is_certain=False)
    best, best_rate = 0, -1.0
    if rates["worth"] > 0:
        gains = np.cumsum(run["gains"])
        for size in run["drafted_sizes"][: run["num_drafted_sizes"]]:
            rate = (1 + gains[size - 1]) / step_ms[size]
            if rate > best_rate:
                best, best_rate = size, rate
    run["has_chosen"], run["believed_ms"] = False, step_ms[best]
    run["num_drafted"] = run["num_verified"] = best
    return best


@njit(cache=True)
def _expected(run: Record, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a sequence is expected to accept of each draft [N], by the calibration's [B, N]."""
    found = np.zeros(min(predicted.shape[1], run["num_gains"]))
    for index in range(found.size):
        found[index] = predicted[:, index].sum() * (1 - run["doubt"]) / predicted.shape[0]
    return found


@njit(cache=True)
def _follow_gains(run: Record, found: NDArray[np.float64], num_seqs: int) -> None:
    """Let the gains follow the acceptance probabilities [N] of a step's drafts."""
    constants, gains = run["constants"], run["gains"]
    run["num_drafted_steps"] += 1
    run["num_samples"] += num_seqs
    # The first steps count alike.
    memory = min(constants["gain_memory"], 1 - 1 / (constants["first_weight"] + run["num_drafted_steps"]))
    # A device may verify more than were asked for.
    seen = max(run["num_drafted"], found.size)
    for index in range(min(seen, run["num_gains"])):
        # What was asked for and not found gives nothing.
        probability = found[index] if index < found.size else 0.0
        gains[index] = memory * gains[index] + (1 - memory) * probability
    # Nodes that were not drafted: each is assumed to be to the one before as the last drafted node is to its
    # predecessor. The first one's predecessor is the root, which gives one token.
    before = gains[seen - 2] if seen > 1 else 1.0
    falling = constants["next_gain"]
    if before > 0:
        falling = max(falling, min(constants["most_next_gain"], gains[seen - 1] / before))
    for index in range(seen, run["num_gains"]):
        gains[index] = gains[index - 1] * falling


@njit(cache=True)
def follow_first_drafts(run: Record, first: NDArray[np.float64], are_right: NDArray[np.bool_]) -> None:
    """Learn from the drafts of a step, by Bayes' rule.

    first: float64 [B], the acceptance probability of each sequence's first draft
    are_right: bool [B], whether a draft of the sequence was accepted
    """
    doubt, useless = run["doubt"], run["constants"]["useless_acceptance"]
    for index in range(first.size):
        acceptance = min(max(first[index], useless), 0.99)
        if are_right[index]:
            wrong, right = doubt * useless, (1 - doubt) * acceptance
        else:
            wrong, right = doubt * (1 - useless), (1 - doubt) * (1 - acceptance)
        doubt = wrong / (wrong + right)
    run["doubt"] = doubt


@njit(cache=True)
def forget_doubt(run: Record, past: Record) -> None:
    """After every step, also one without drafts: let the doubt go back, and that of past texts follow it."""
    constants = run["constants"]
    run["doubt"] += constants["changed"] * (constants["usual_doubt"] - run["doubt"])
    past["doubt"] += (1 - constants["past_memory"]) * (run["doubt"] - past["doubt"])


@njit(cache=True)
def _remember_gains(run: Record, past: Record) -> None:
    """After a step that drafted: add the text's gains to those of past texts."""
    memory = run["constants"]["past_memory"]
    past["num_drafted"] = memory * past["num_drafted"] + 1
    for index in range(run["num_gains"]):
        past["gain_sums"][index] = memory * past["gain_sums"][index] + run["gains"][index]


@njit(cache=True)
def _follow_worth(run: Record, rates: Record, times: Record, counts: NDArray[np.int64]) -> None:
    """Let the worth and the rate follow a drafted step that gave so many tokens [B]."""
    if not np.isfinite(run["believed_ms"]):
        return  # The time of a draft is not known yet.
    constants, num_seqs, accepted = run["constants"], counts.size, counts.sum() / counts.size - 1
    gain = run["expected_gain"] + constants["accepted_share"] * (accepted - run["expected_gain"])
    worth = gain - rates["tokens"] / rates["ms"] * (run["believed_ms"] - times["corrected"][0])
    # Every sequence of the step is a sample.
    first = 1 - num_seqs / (constants["first_weight"] + run["num_samples"])
    memory = min(constants["worth_memory"] ** num_seqs, first)
    rates["worth"] = memory * rates["worth"] + (1 - memory) * worth
    _follow_rate(run, rates, gain)


@njit(cache=True)
def _follow_rate(run: Record, rates: Record, gain: float) -> None:
    """The step gave ``gain`` tokens more than a plain one."""
    memory = run["constants"]["rate_memory"]
    rates["tokens"] = memory * rates["tokens"] + 1 + gain
    rates["ms"] = memory * rates["ms"] + run["believed_ms"]


@njit(cache=True)
def _most_worth(run: Record, rates: Record, times: Record, is_certain: bool) -> float:
    """What a step that drafts gives more than a plain one, but at most what is assumed at first.

    It drafts the best number of nodes by the gains, or as if every draft were certain to be accepted.
    """
    rate, step_ms = rates["tokens"] / rates["ms"], times["corrected"]
    best, gains = -np.inf, np.cumsum(run["gains"])
    for size in run["drafted_sizes"][: run["num_drafted_sizes"]]:
        gain = float(size) if is_certain else gains[size - 1]
        best = max(best, gain - rate * (step_ms[size] - step_ms[0]))
    return min(run["constants"]["first_worth"] * (1 - run["doubt"]), best)
