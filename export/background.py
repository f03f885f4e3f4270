"""Work in a process of its own: Python threads cannot trace graphs beside other work.

This module imports no torch, so that a process that needs none begins at once.
"""

import multiprocessing
import pickle
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

from export.errors import ExportError

T = TypeVar("T")


class BackgroundProcess(Generic[T]):
    """Runs ``function(*arguments)``, whose results may be many.

    on_result: called with each as soon as it has come, in a thread of this process
    Leaving the block ends the process, even in the middle of its work. Function, arguments and results have
    to be picklable.
    """

    def __init__(
        self,
        function: Callable[..., Iterable[T]],
        arguments: tuple[Any, ...],
        on_result: Callable[[T], None],
    ):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_results, args=(theirs, function, arguments), daemon=True)
        # Python's process for resources has to start first, because starting it unblocks signals.
        resource_tracker.ensure_running()
        # The new process inherits that Ctrl-C is blocked: this process handles Ctrl-C and ends the other.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._thread = ThreadPoolExecutor(1)
        self._received = self._thread.submit(self._receive, on_result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()
        self._thread.shutdown()
        self._connection.close()

    def results(self) -> list[T]:
        """All results, once there are no more. Raises what the function raised."""
        return self._received.result()

    def _receive(self, on_result: Callable[[T], None]) -> list[T]:
        results: list[T] = []
        try:
            while (message := self._connection.recv()) is not None:
                if isinstance(message, BaseException):
                    raise message
                results.append(message)
                on_result(message)
        except EOFError:
            self._process.join()
            raise ExportError(
                f"a process of the export ended with the status {self._process.exitcode}; if it was killed, "
                "there may not be enough memory"
            ) from None
        return results


def _send_results(
    connection: Connection, function: Callable[..., Iterable[T]], arguments: tuple[Any, ...]
) -> None:
    # A process that is killed leaves shared resources of libraries behind; one that exits cleans up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for result in function(*arguments):
            connection.send(result)
    except Exception as error:
        connection.send(_sendable(error))
    connection.send(None)
    # From here on a signal would interrupt the clean-up of libraries and show a traceback.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _sendable(error: Exception) -> Exception:
    """The error itself, or its type and text where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ExportError(f"{type(error).__name__}: {error}")
    return error
