"""How many draft nodes a step verifies: the interface, and the budget of a fixed number."""

from typing import Protocol

from runtime.decode.step import StepResult


class NodeBudget(Protocol):
    """Chooses how many draft nodes each sequence of the next step may have, and learns from the result."""

    def num_nodes(self, num_seqs: int) -> int:
        """For a step of ``num_seqs`` sequences; 0 leaves the draft head out."""
        ...

    def learn(self, result: StepResult) -> None: ...

    def record_step_time(self, ms: float) -> None:
        """Milliseconds that the step took, handing out its tokens included; where the caller knows."""
        ...


class FixedBudget:
    """Every sequence has up to ``count`` draft nodes in every step."""

    def __init__(self, count: int):
        self._count = count

    def num_nodes(self, num_seqs: int) -> int:
        return self._count

    def learn(self, result: StepResult) -> None:
        pass

    def record_step_time(self, ms: float) -> None:
        pass
