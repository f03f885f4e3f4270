"""Where a step's time goes: a recorder that the decode step marks after each stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

STAGES = ("draft", "search", "verify", "accept", "commit")


class Recorder(Protocol):
    """Is told when the stages of every step end.

    wants_stages: whether the stages matter; a device then runs them one by one
    """

    wants_stages: bool

    def begin(self) -> None: ...
    def mark(self, stage: str, after_ms: float | None = None) -> None:
        """A stage ends now, or ended ``after_ms`` after the beginning of the step."""

    def end(self, num_seqs: int, num_nodes: int, num_accepted: int) -> None: ...


class NullRecorder:
    """Records nothing."""

    wants_stages = False

    def begin(self) -> None:
        pass

    def mark(self, stage: str, after_ms: float | None = None) -> None:
        pass

    def end(self, num_seqs: int, num_nodes: int, num_accepted: int) -> None:
        pass


@dataclass(frozen=True)
class StepRecord:
    """One step, in nanoseconds of ``time.perf_counter_ns``.

    stages: name and end of every stage, in order
    num_nodes: nodes verified, the roots among them; num_accepted: drafts accepted; both over all sequences
    """

    begin_ns: int
    stages: tuple[tuple[str, int], ...]
    end_ns: int
    num_seqs: int
    num_nodes: int
    num_accepted: int

    @property
    def step_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6

    def stage_ms(self, stage: str) -> float:
        """Milliseconds in a stage; 0 where the step has none of this name."""
        ms, begin = 0.0, self.begin_ns
        for name, end in self.stages:
            ms += (end - begin) / 1e6 if name == stage else 0.0
            begin = end
        return ms


class StageRecorder:
    """Keeps a record of every step."""

    def __init__(self, *, wants_stages: bool = True) -> None:
        self.wants_stages = wants_stages
        self.steps: list[StepRecord] = []
        self._begin = 0
        self._marks: list[tuple[str, int]] = []

    def begin(self) -> None:
        self._marks = []
        self._begin = time.perf_counter_ns()

    def mark(self, stage: str, after_ms: float | None = None) -> None:
        end = time.perf_counter_ns() if after_ms is None else self._begin + round(1e6 * after_ms)
        self._marks.append((stage, end))

    def end(self, num_seqs: int, num_nodes: int, num_accepted: int) -> None:
        end, marks = time.perf_counter_ns(), tuple(self._marks)
        self.steps.append(StepRecord(self._begin, marks, end, num_seqs, num_nodes, num_accepted))


class HasRecorder(Protocol):
    recorder: Recorder


R = TypeVar("R", bound=Recorder)


@contextmanager
def recording(owner: HasRecorder, recorder: R) -> Iterator[R]:
    """Record with ``recorder``; the recorder that was there before is back afterwards."""
    before, owner.recorder = owner.recorder, recorder
    try:
        yield recorder
    finally:
        owner.recorder = before
