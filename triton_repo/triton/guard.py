"""Run tritonserver or our worker for a launcher, and leave nothing of it behind however the launcher ends.

The launcher has a directory of its own: the model repository, the backend, and the socket of the heartbeats.

The guard is a process of its own. Its launcher writes commands to its stdin, a line each: ``start`` and
``kill``. It writes ``ended STATUS`` to its stdout for every server that has ended. When its stdin is closed,
which also happens when the launcher is killed, it kills the server with its model processes and removes the
launcher's directory.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runtime.core.errors import UserError

PREFIX, LOCK, HEARTBEAT = "ctc-speculator-", "lock", "heartbeat"
# Bytes of a path of a Unix socket, on every system.
MAX_SOCKET_PATH = 103
SHARED_MEMORY = Path("/dev/shm")
# Linux' numbers of the options "signal this process when its parent ends" and "children whose parents have
# ended become this process's".
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(argv: list[str]) -> int:
    """argv: the launcher's directory, and the server's command"""
    directory, *command = argv
    # Ctrl-C and a closed terminal are the launcher's business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = _Guard(Path(directory), command)
    for line in sys.stdin:
        guard.run(line.strip())
    guard.run("kill")
    shutil.rmtree(directory, ignore_errors=True)
    return 0


def shared_memory_prefix(directory: Path) -> str:
    """What the names of the shared memory of a launcher's model processes begin with."""
    return f"{directory.name}-"


def remove_shared_memory(directory: Path) -> None:
    """Remove what the model processes of a launcher have left, which have to have ended."""
    for path in SHARED_MEMORY.glob(f"{shared_memory_prefix(directory)}*"):
        path.unlink(missing_ok=True)


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


class _Guard:
    def __init__(self, directory: Path, command: list[str]):
        self._directory, self._command = directory, command
        self._server: subprocess.Popen[bytes] | None = None
        self._waiting: threading.Thread | None = None

    def run(self, command: str) -> None:
        if command == "start":
            self._start()
        elif self._server is not None and self._waiting is not None and command == "kill":
            self._server.kill()
            self._waiting.join()

    def _start(self) -> None:
        # A group of its own, with the model processes that tritonserver starts.
        self._server = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            process_group=0,
            preexec_fn=_end_with_parent,
        )
        self._waiting = threading.Thread(target=self._wait, args=(self._server,), daemon=True)
        self._waiting.start()

    def _wait(self, server: "subprocess.Popen[bytes]") -> None:
        status = server.wait()
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        # The model processes have become the guard's. When they have ended, their memory is free.
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-server.pid, 0)
        remove_shared_memory(self._directory)
        with suppress(BrokenPipeError):  # the launcher has gone
            print(f"ended {status}", flush=True)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the guard ends, should somebody kill the guard."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
