"""What a process does in ``test_background``. It imports little, so that the process begins at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator

from export.errors import ExportError


def squares(count: int) -> Iterator[int]:
    yield from (number**2 for number in range(count))


def refuses() -> Iterator[int]:
    yield 1
    raise ExportError("--step-nodes: no")


class Locked(Exception):
    """Holds what pickle refuses."""


class TwoParts(Exception):
    """Pickle makes it of its text alone, and fails."""

    def __init__(self, first: str, second: str):
        super().__init__(f"{first} and {second}")


def raises_a_lock() -> Iterator[int]:
    yield 1
    error = Locked("the reason")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def raises_two_parts() -> Iterator[int]:
    yield 1
    raise TwoParts("a", "b")


def is_killed() -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield 1


def survives_ctrl_c() -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGINT)
    yield 1


def never_ends() -> Iterator[int]:
    yield 1
    time.sleep(1000)
