"""Time and memory of a command that runs in a process of its own."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.05


@dataclass
class Watched:
    """What a command took.

    resident: bytes at the peak, with the pages of mapped files, which the system can take back
    private: bytes at the peak that the process itself held
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    resident: int = 0
    private: int = 0


def run_watched(command: list[str]) -> Watched:
    """Run a command in the project's root. Raises SystemExit when it fails."""
    began, found = time.perf_counter(), Watched()
    with psutil.Popen(command, cwd=ROOT) as child:
        while child.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                memory, times = child.memory_info(), child.cpu_times()
                found.resident = max(found.resident, memory.rss)
                found.private = max(found.private, memory.rss - memory.shared)
                found.cpu_seconds = times.user + times.system
            time.sleep(POLL_SECONDS)
    found.seconds = time.perf_counter() - began
    if child.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed with code {child.returncode}")
    return found
