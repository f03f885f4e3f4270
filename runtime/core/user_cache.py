"""Directories of the user's cache, for what is compiled once and read at the next start."""

import os
from pathlib import Path


def cache_directory(kind: str, variable: str) -> Path | None:
    """The directory for files of a kind, which may not exist yet.

    variable: the environment variable that names another directory; if it is empty there is none
    Returns None there. Raises RuntimeError for a user without a home.
    """
    directory = os.environ.get(variable)
    if directory is not None:
        return Path(directory) if directory else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctc-speculator" / kind


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole: another process reads all of it or what was there, and may write it too."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
