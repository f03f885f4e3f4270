"""The launcher's own lines in the log, among those of tritonserver."""

import sys

STOPPED_EARLY = "stopped before the models were ready"


def say(line: str) -> None:
    """Write one line, which begins with the command's name."""
    print(f"serve: {line}", file=sys.stderr, flush=True)
