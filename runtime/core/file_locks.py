"""Locks on files and directories. A lock ends with the process that holds it, however that ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


def lock(descriptor: int, *, wait: bool) -> bool:
    """Hold a lock until the descriptor is closed. False where the file system has no locks.

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
