"""Which commit of this project runs."""

import subprocess
from pathlib import Path


def git_sha() -> str | None:
    """The commit of this project that is checked out; None outside its repository."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    top, _, commit = done.stdout.strip().partition("\n")
    # An installed project may lie in the repository of another one.
    return commit if commit and Path(top).resolve() == root else None
