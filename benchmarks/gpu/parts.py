"""The parts of the report: each is measured on its own, and one that fails leaves the others alone."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.profiler.report import Table

# Statuses of a part. Only verifications pass or fail. ``error``: the part could not be finished.
# ``not checked``: a verification had nothing to compare with.
PASSED, FAILED, UNCHECKED = "passed", "failed", "not checked"
MEASURED, SKIPPED, ERROR = "measured", "skipped", "error"


class Skip(Exception):
    """Raised where a part, or a row of one, has nothing to measure; the message says why."""


@dataclass
class Part:
    """The results of a part.

    tables: by caption, each with its header as the first row
    charts: SVG texts
    data: the numbers behind the tables, for ``gpu.json``
    """

    status: str = MEASURED
    reason: str = ""
    seconds: float = 0.0
    tables: dict[str, Table] = field(default_factory=dict)
    charts: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, "seconds": self.seconds, **self.data}


def run_part(measure: Callable[[], Part], *, after_error: Callable[[], None]) -> Part:
    """Call ``measure``. If it raises, return a part that says why.

    after_error: clears away what may be broken, so that the next part begins anew
    """
    began = time.perf_counter()
    try:
        part = measure()
    except Skip as skip:
        part = Part(SKIPPED, str(skip))
    except Exception as error:
        # The other parts are still useful.
        part = Part(ERROR, f"{type(error).__name__}: {error}")
        after_error()
    part.seconds = time.perf_counter() - began
    return part


def is_bad(parts: Mapping[str, Part], checks: Sequence[str]) -> bool:
    """Whether a check among these failed, had nothing to compare with, or could not be finished."""
    return any(parts[name].status in (FAILED, UNCHECKED, ERROR) for name in checks if name in parts)


def cell(value: float | str | None, digits: int = 3) -> str:
    """A number for a table; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
