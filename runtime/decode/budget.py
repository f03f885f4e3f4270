"""How many draft nodes a step verifies: as many as pay for themselves.

A step that verifies n nodes for each sequence gives

    tokens(n) = 1 + gain_1 + ... + gain_n

tokens a sequence and takes ms(n) milliseconds on this machine. gain_i is the probability that a sequence's
i-th best node is accepted. All sequences have the same n: a pass is padded to the widest sequence, so nodes
that one sequence does not need cannot go to another.

Over many steps, tokens for each millisecond are most where every step maximises

    tokens(n) - rate * ms(n),

with the rate that results (Dinkelbach, 1967, on fractional programs). There are three choices in a step.

Whether the head runs at all. The worth of a step that drafts is what it gives more than a plain one, less
what the additional milliseconds give elsewhere:

    gain_1 + ... + gain_n - rate * (ms(n) - ms(0)),

where ms(n) has the time of the draft in it, also if n = 0 of its nodes are verified. The head runs while the
mean worth of the last drafted steps is above 0. Plain steps show nothing of drafts. In them the worth slowly
rises, until it is above 0 and the head is tried: the more rarely, the less its drafts gave.

How many nodes the head drafts: by gains averaged over the last drafted steps, the n with the best rate
tokens(n) / ms(n).

How many of them are verified. After the draft the probabilities of this step's nodes are known: a node is
verified if it gives more than its milliseconds give elsewhere. So a step in which the head is sure verifies
many nodes, another one few or none. The token that a step without nodes gives shows whether the first draft
was right. A device verifies a fixed number of nodes, so there this choice is left out.

A head may also be sure of what is wrong, in a text that it does not know or because it was trained for
another model. So acceptance probabilities are multiplied by the probability that they hold
(``runtime.decode.head_trust``), which follows whether drafts are accepted. Where it is low, the worth also
rises more slowly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from runtime.core.calibration import RunningCalibration
from runtime.decode.head_trust import HeadTrust, PastTexts, TrustConstants
from runtime.decode.step import StepResult
from runtime.decode.step_costs import StepCosts


class NodeBudget(Protocol):
    """Chooses how many draft nodes each sequence of the next step has, and learns from the result."""

    def num_nodes(self, num_seqs: int) -> int:
        """How many are drafted in a step of ``num_seqs`` sequences; 0 leaves the draft head out."""
        ...

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        """How many of those drafted are verified, by their log probabilities as in ``StepResult``."""
        ...

    def learn(self, result: StepResult) -> None: ...

    def record_step_time(self, ms: float) -> None:
        """Milliseconds that the step took."""
        ...


class FixedBudget:
    """Every sequence has up to ``count`` draft nodes in every step."""

    def __init__(self, count: int):
        self._count = count

    def num_nodes(self, num_seqs: int) -> int:
        return self._count

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        return node_log_probs.shape[1]

    def learn(self, result: StepResult) -> None:
        pass

    def record_step_time(self, ms: float) -> None:
        pass


@dataclass(frozen=True)
class BudgetConstants(TrustConstants):
    """Chosen on 2 CPU cores with the demo model and SmolLM2-135M-Instruct; docs/performance.md has tables.

    first_gain, next_gain: the assumed gain of a sequence's first draft node before any has been seen, and the
        gain of every further node as a share of the one before. On 25 GSM8K questions the demo head's
        acceptance probabilities begin with 0.83 and fall by factors of 0.84 to 0.87 over ten nodes. A larger
        ``next_gain`` makes the budget try larger trees.
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
        to (1 - unseen_memory) / (1 - worth_memory) * first_worth = 0.018 tokens a step.
    verified_nodes: sizes among which ``num_verified`` chooses; each binds its tensors anew in every text. The
        larger ones make passes of 8, 12 and 16 rows, which products on a CPU compute in whole groups.
    """

    first_gain: float = 0.8
    next_gain: float = 0.85
    first_weight: float = 2.0
    gain_memory: float = 0.9
    first_worth: float = 0.3
    worth_memory: float = 0.95
    accepted_share: float = 0.3
    rate_memory: float = 0.98
    first_steps: float = 5.0
    unseen_memory: float = 0.997
    early_trials: float = 20.0
    verified_nodes: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 11, 15)


DEFAULT_CONSTANTS = BudgetConstants()


class AdaptiveBudget:
    """A ``NodeBudget`` for one run: for a text, or for all texts that share a batch.

    costs: of steps on this machine; budgets of one decoder share them, because they do not depend on the text
    calibration: of the draft head (``DrafterSpec.calibration``); None takes prefix probabilities as they are
    tree_sizes: numbers of nodes that a step can have, as of ``StepRunner``; empty for any
    past: of earlier texts, which the budgets of one decoder share; None begins without any
    """

    def __init__(
        self,
        costs: StepCosts,
        calibration: tuple[float, float] | None,
        constants: BudgetConstants = DEFAULT_CONSTANTS,
        *,
        tree_sizes: Sequence[int] = (),
        past: PastTexts | None = None,
    ):
        self._constants = constants
        self._costs = costs
        self._trust = HeadTrust(constants, past)
        self._calibration = RunningCalibration(*(calibration or (1.0, 0.0)))
        first_gain = constants.first_gain * self._trust.probability
        self._gains = first_gain * constants.next_gain ** np.arange(costs.max_nodes)
        self._certain = np.ones_like(self._gains)
        every = np.arange(1, costs.max_nodes + 1)
        self._choices = every[np.isin(every, tree_sizes)] if tree_sizes else every
        self._sizes = np.array(constants.verified_nodes)
        self._num_seqs = self._num_drafted = self._num_verified = 0
        # The steps that drafted, and the sequences that had drafts in them.
        self._num_drafted_steps = self._num_samples = 0
        # Of the last step: whether the number of verified nodes was chosen, how long the step was believed to
        # take and how many drafts a sequence was expected to accept, and the time of its draft.
        self._has_chosen = False
        self._believed_ms = self._expected_gain = self._draft_ms = 0.0
        # By the number of sequences: the worth of a drafted step, and the tokens and milliseconds of steps,
        # each a fading sum.
        self._worth: dict[int, float] = {}
        self._sums: dict[int, tuple[float, float]] = {}

    def num_nodes(self, num_seqs: int) -> int:
        self._num_seqs, self._has_chosen = num_seqs, False
        step_ms = self._costs.of(num_seqs)
        if num_seqs not in self._sums:
            # Nothing is known of such steps: the rate begins as that of plain ones.
            first = self._constants.first_steps
            self._sums[num_seqs] = first, first * float(step_ms[0])
            self._worth[num_seqs] = self._most_worth(self._gains)
        best = _best_size(self._gains, step_ms, self._choices) if self._worth[num_seqs] > 0 else 0
        self._num_drafted = self._num_verified = best
        self._believed_ms = float(step_ms[best])
        return best

    def num_verified(self, node_log_probs: NDArray[np.float64]) -> int:
        found = self._expected(self._calibration.predict_logs(node_log_probs))
        self._follow_gains(found)
        step_ms = self._costs.with_draft(self._num_seqs)
        best, gain = _worth_verifying(found, step_ms, self._rate(), self._sizes) if found.size else (0, 0.0)
        self._num_verified, self._has_chosen = best, True
        self._believed_ms, self._expected_gain = float(step_ms[best]), gain
        return best

    def learn(self, result: StepResult) -> None:
        self._draft_ms, num_seqs = result.draft_ms, self._num_seqs
        if self._num_drafted:
            log_probs, num_right = result.node_log_probs, result.counts - 1
            if result.unverified is not None:
                log_probs = result.unverified.log_probs
                num_right = result.unverified.are_right.astype(np.int64)
            predicted = self._calibration.predict_logs(log_probs)
            if self._has_chosen:
                self._follow_worth(int(result.counts.sum()) / result.counts.size - 1)
            else:
                # The number was fixed before the draft, so the worth is that of the best fixed number.
                found = self._expected(predicted)
                self._follow_gains(found)
                self._follow_rate(float(found.sum()))
                self._worth[num_seqs] = self._most_worth(self._gains)
            self._calibration.update(predicted, int(num_right.sum()))
            if predicted.size:
                self._trust.follow(predicted[:, 0], num_right > 0)
        else:
            self._follow_rate(0.0)
            # The square makes trials of a useless head rarer than the probability alone.
            share = (1 - self._constants.unseen_memory) * self._trust.probability**2
            if self._num_samples:
                share *= 1 + self._constants.early_trials / self._num_samples
            self._worth[num_seqs] += share * (self._most_worth(self._certain) - self._worth[num_seqs])
        self._trust.end_step()

    def record_step_time(self, ms: float) -> None:
        # The first step that drafts also reads the prompt with the head: others take no longer.
        if self._num_drafted_steps > 1 or not self._num_drafted or ms < self._believed_ms:
            self._costs.record(self._num_seqs, self._num_verified, ms, self._draft_ms)

    def _expected(self, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a sequence is expected to accept of each draft, [N], by the calibration's [B, N]."""
        found: NDArray[np.float64] = _means(predicted, self._trust.probability, self._gains.size)
        return found

    def _follow_gains(self, found: NDArray[np.float64]) -> None:
        """Let the gains follow the acceptance probabilities [N] of a step's drafts."""
        self._num_drafted_steps += 1
        self._num_samples += self._num_seqs
        # The first steps count alike.
        first = 1 - 1 / (self._constants.first_weight + self._num_drafted_steps)
        memory = min(self._constants.gain_memory, first)
        _follow(self._gains, found, self._num_drafted, memory, self._constants.next_gain)

    def _follow_worth(self, accepted: float) -> None:
        """Let the worth and the rate follow a drafted step, of which a sequence accepted so many drafts."""
        if not np.isfinite(self._believed_ms):
            return  # The time of a draft is not known yet.
        gain = self._expected_gain + self._constants.accepted_share * (accepted - self._expected_gain)
        more_ms = self._believed_ms - float(self._costs.of(self._num_seqs)[0])
        # Every sequence of the step is a sample.
        constants, num_seqs = self._constants, self._num_seqs
        first = 1 - num_seqs / (constants.first_weight + self._num_samples)
        memory = min(constants.worth_memory**num_seqs, first)
        worth = memory * self._worth[num_seqs] + (1 - memory) * (gain - self._rate() * more_ms)
        self._worth[num_seqs] = worth
        self._follow_rate(gain)

    def _follow_rate(self, gain: float) -> None:
        """The step gave ``gain`` tokens more than a plain one."""
        tokens, ms = self._sums[self._num_seqs]
        memory = self._constants.rate_memory
        self._sums[self._num_seqs] = memory * tokens + 1 + gain, memory * ms + self._believed_ms

    def _rate(self) -> float:
        """Tokens for each millisecond."""
        tokens, ms = self._sums[self._num_seqs]
        return tokens / ms

    def _most_worth(self, gains: NDArray[np.float64]) -> float:
        """The worth of a step that drafts with these gains, but at most the one that is assumed at first."""
        most = self._constants.first_worth * self._trust.probability
        return min(most, _best_worth(gains, self._costs.of(self._num_seqs), self._rate(), self._choices))


# The rest is compiled: a step asks for a few numbers, for which numpy takes twenty calls.


@njit(cache=True)
def _best_size(gains: NDArray[np.float64], step_ms: NDArray[np.float64], choices: NDArray[np.int64]) -> int:
    """The choice of 1, ..., N nodes with the most tokens for each millisecond."""
    best, best_rate, tokens, size = 0, -1.0, 1.0, 0
    for choice in choices:
        while size < choice:
            tokens += gains[size]
            size += 1
        if tokens / step_ms[choice] > best_rate:
            best, best_rate = choice, tokens / step_ms[choice]
    return best


@njit(cache=True)
def _best_worth(
    gains: NDArray[np.float64], step_ms: NDArray[np.float64], rate: float, choices: NDArray[np.int64]
) -> float:
    """What a step drafting one of 1, ..., N nodes gives more than a plain one, at most (see above)."""
    best, tokens, size = -np.inf, 0.0, 0
    for choice in choices:
        while size < choice:
            tokens += gains[size]
            size += 1
        best = max(best, tokens - rate * (step_ms[choice] - step_ms[0]))
    return best


@njit(cache=True)
def _worth_verifying(
    found: NDArray[np.float64], step_ms: NDArray[np.float64], rate: float, sizes: NDArray[np.int64]
) -> tuple[int, float]:
    """The number n of the drafts, of N >= 1, with the most gain less rate * ms(n), and that gain.

    step_ms: of steps that have drafted
    """
    best, best_gain, best_worth = 1, found[0], -np.inf
    gain, summed = 0.0, 0
    for size in sizes:
        if size > found.size:
            break
        while summed < size:
            gain += found[summed]
            summed += 1
        worth = gain - rate * step_ms[size]
        if worth > best_worth:
            best, best_gain, best_worth = size, gain, worth
    return best, best_gain


@njit(cache=True)
def _means(predicted: NDArray[np.float64], factor: float, most: int) -> NDArray[np.float64]:
    """The means of [B, N] over B, times a factor: the first ``most`` at most."""
    found = np.zeros(min(predicted.shape[1], most))
    for index in range(found.size):
        for row in range(predicted.shape[0]):
            found[index] += predicted[row, index]
        found[index] *= factor / predicted.shape[0]
    return found


@njit(cache=True)
def _follow(
    gains: NDArray[np.float64], found: NDArray[np.float64], num_drafted: int, memory: float, next_gain: float
) -> None:
    """Move the gains [M] towards what was found [N <= M] of the drafts that were asked for."""
    # A device may verify more than were asked for.
    seen = max(num_drafted, found.size)
    for index in range(gains.size):
        if index >= seen:
            # It was not seen: gains are assumed to fall off from the last one that was.
            gains[index] = gains[index - 1] * next_gain
        else:
            # What was asked for and not found gives nothing.
            probability = found[index] if index < found.size else 0.0
            gains[index] = memory * gains[index] + (1 - memory) * probability
