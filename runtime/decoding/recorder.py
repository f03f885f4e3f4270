"""Where a step's time goes: a recorder that the decode loop marks after each stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

STAGES = ("draft", "transform", "verify", "accept", "commit")


class Recorder(Protocol):
    """Hears about the stages of every step."""

    def begin(self) -> None: ...
    def mark(self, stage: str) -> None: ...
    def end(self, num_rows: int, num_nodes: int, num_accepted: int) -> None: ...


class NullRecorder:
    """Records nothing."""

    def begin(self) -> None:
        pass

    def mark(self, stage: str) -> None:
        pass

    def end(self, num_rows: int, num_nodes: int, num_accepted: int) -> None:
        pass


@dataclass(frozen=True)
class StepRecord:
    """One decode step; times are nanoseconds of ``time.perf_counter_ns``.

    stages: (name, end) of every stage, in their order
    num_nodes: nodes verified, the roots included; num_accepted: drafts accepted, both over all sequences
    """

    begin_ns: int
    stages: tuple[tuple[str, int], ...]
    end_ns: int
    num_sequences: int
    num_nodes: int
    num_accepted: int

    @property
    def step_ms(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e6


class StageRecorder:
    """Keeps a record of every step."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._begin = 0
        self._stages: list[tuple[str, int]] = []

    def begin(self) -> None:
        self._stages = []
        self._begin = time.perf_counter_ns()

    def mark(self, stage: str) -> None:
        self._stages.append((stage, time.perf_counter_ns()))

    def end(self, num_rows: int, num_nodes: int, num_accepted: int) -> None:
        end = time.perf_counter_ns()
        stages = tuple(self._stages)
        self.steps.append(StepRecord(self._begin, stages, end, num_rows, num_nodes, num_accepted))


class HasRecorder(Protocol):
    """A batch, for example."""

    recorder: Recorder


R = TypeVar("R", bound=Recorder)


@contextmanager
def recording(owner: HasRecorder, recorder: R) -> Iterator[R]:
    """Let ``recorder`` hear of the owner's steps inside the block; afterwards its recorder is the old one."""
    before, owner.recorder = owner.recorder, recorder
    try:
        yield recorder
    finally:
        owner.recorder = before
