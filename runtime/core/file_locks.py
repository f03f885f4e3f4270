"""Locks on files and directories. A lock ends with the process that holds it, however that ends."""

import sys

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
