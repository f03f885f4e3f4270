"""The launcher's own lines in the log, among those of the server behind it."""

import sys

# What the two servers are called.
TRITONSERVER, WORKER = "tritonserver", "the worker"
STOPPED_EARLY = "stopped before the models were ready"


def say(line: str) -> None:
    """Write one line, which begins with the command's name."""
    print(f"serve: {line}", file=sys.stderr, flush=True)
