"""What a build says while it runs."""

import sys
import time
from collections.abc import Callable

Progress = Callable[[str], None]


def clock() -> Progress:
    """Prints messages on stderr with the seconds since now."""
    began = time.perf_counter()

    def progress(message: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {message}", file=sys.stderr, flush=True)

    return progress
