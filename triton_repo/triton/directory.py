"""The launcher's own directory: the model repository, the backend, and the socket of the heartbeats."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.core.errors import UserError
from triton_repo.triton.guard import remove_shared_memory

PREFIX, LOCK, HEARTBEAT = "ctc-speculator-", "lock", "heartbeat"
# Bytes of a path of a Unix socket, on every system.
MAX_SOCKET_PATH = 103


@contextmanager
def own_directory() -> Iterator[Path]:
    """A new directory for the block, which is removed afterwards, like those of launchers that were killed.

    A lock says that the launcher of a directory lives.
    Raises UserError where the directory for temporary files has too long a path for the socket.
    """
    longest = MAX_SOCKET_PATH - len(f"/{PREFIX}12345678/{HEARTBEAT}")
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > longest:
        problem = f"must be a path of at most {longest} bytes, since a socket is made there, got {parent}"
        raise UserError(problem, field="TMPDIR")
    _remove_stale()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        # Whoever finds the lock finds it locked.
        new = directory / f"{LOCK}.new"
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(directory / LOCK)
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _remove_stale() -> None:
    """Remove the directories whose launchers and guards were killed, with their shared memory."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            with path.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_shared_memory(path.parent)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # its launcher lives, or it is another user's
            continue
