"""What surrounds a process: processors, the user's cache, locks on files, this project's commit, packages."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

OURS = "ctc-speculator"
PACKAGES = (OURS, "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "tokenizers")


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def lock(descriptor: int, *, wait: bool) -> bool:
    """Hold a lock until the descriptor is closed or its process ends; False where there are no locks.

    wait: for others that hold it; without it, BlockingIOError is raised where others do
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked_directory(directory: Path) -> Iterator[bool]:
    """Hold a lock on a directory within the block; False where there are none.

    Raises BlockingIOError where others hold it.
    """
    if sys.platform == "win32":  # which opens no directories
        yield False
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        yield lock(descriptor, wait=False)
    finally:
        os.close(descriptor)


def git_sha() -> str | None:
    """The commit of this project that is checked out; None outside its repository."""
    import subprocess  # which few commands need

    root = Path(__file__).resolve().parents[2]
    command = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    top, _, commit = done.stdout.strip().partition("\n")
    # An installed project may lie in the repository of another one.
    return commit if commit and Path(top).resolve() == root else None


def installed_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """What a bundle or a draft directory records, by package.

    A checkout that is not installed has no version, nor has a wheel of another name.
    """
    import importlib.metadata  # takes as long as all else that a help text needs

    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
