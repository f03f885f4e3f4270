"""Where a step's time goes: a recorder that the decode loop marks after each stage."""

import time
from typing import Protocol

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


class StageRecorder:
    """Keeps every step's marks, in nanoseconds of ``time.perf_counter_ns``.

    steps: one row a step: (begin, [(stage, end of stage), ...], end, nodes verified, drafts accepted)
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[tuple[str, int]], int, int, int]] = []
        self._begin = 0
        self._marks: list[tuple[str, int]] = []

    def begin(self) -> None:
        self._marks = []
        self._begin = time.perf_counter_ns()

    def mark(self, stage: str) -> None:
        self._marks.append((stage, time.perf_counter_ns()))

    def end(self, num_rows: int, num_nodes: int, num_accepted: int) -> None:
        self.steps.append((self._begin, self._marks, time.perf_counter_ns(), num_nodes, num_accepted))
