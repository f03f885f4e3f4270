"""The constants of the adaptive budget in one place, each with what it was measured by and what it
changes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BudgetConstants:
    """Chosen with the shipped demo model on 2 CPU cores; docs/serving.md has a table measured with them.

    first_gain, next_gain: what a sequence's first draft node is taken to give before any has been seen, and
        every further node in terms of the one before. On 25 GSM8K questions the demo head's acceptance
        probabilities begin with 0.83 and fall by factors of 0.84 to 0.87 over ten nodes. A larger
        ``next_gain`` makes the budget try larger trees.
    gain_memory: weight of the past in the marginal gains after each step. Texts change within tens of steps;
        0.9 averages about ten.
    time_memory: weight of the past in the correction of step times, about ten steps.
    max_time_factor: a step's recorded time counts as at most so many times longer or shorter than the one
        measured beforehand, so that one descheduled step does not change the choice.
    unseen_memory: weight of the past in the gains after a plain step, which shows nothing of them. With
        0.998, a head that gives half of what would pay drafts in 2 % of the steps. Serving 1 to 32 streams
        is as fast with it as with trials of six steps after 64 plain ones, within the spread of runs.
    max_nodes: largest tree that is considered. On a CPU steps cost more with every node, and 16 nodes are
        slower than 8 with the demo model (README).
    measured_nodes, measured_steps, measured_rounds, max_measured_tokens: what loading a decoder times: these
        numbers of nodes, so many steps of each, in so many rounds for a single sequence. Passes over more
        tokens are extrapolated, since their time is proportional to their arithmetic. More of each makes
        loading slower.
    """

    first_gain: float = 0.8
    next_gain: float = 0.85
    gain_memory: float = 0.9
    time_memory: float = 0.9
    max_time_factor: float = 5.0
    unseen_memory: float = 0.998
    max_nodes: int = 16
    measured_nodes: tuple[int, ...] = (0, 1, 2, 4, 6, 8, 12, 16)
    measured_steps: int = 6
    measured_rounds: int = 3
    max_measured_tokens: int = 256


DEFAULT_CONSTANTS = BudgetConstants()
