"""What every command line of the project shares: exit statuses and argument types."""

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.errors import DeviceError, UserError

EXIT_DEVICE_ERROR, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
# In place of a number of draft nodes: every step verifies as many as pay for themselves.
AUTO = "auto"


def exit_status(
    name: str, command: Callable[[], int], *, interrupted: str | Callable[[], str] = "interrupted"
) -> int:
    """Run a command and return its exit status.

    A UserError becomes one line on stderr and status 2, a DeviceError one line and status 1, because the same
    command may succeed on another device; Ctrl-C becomes the line ``interrupted`` and status 130, SIGTERM the
    same line and status 143. A line that depends on how far the command came is a function.
    """
    try:
        with _termination_interrupts():
            return command()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except DeviceError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_DEVICE_ERROR
    except KeyboardInterrupt as stop:
        print(f"{name}: {interrupted() if callable(interrupted) else interrupted}", file=sys.stderr)
        return EXIT_TERMINATED if isinstance(stop, _Terminated) else EXIT_INTERRUPTED


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which by default would leave what a command has half-written."""


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, unless the program handles it in its own way."""

    def interrupt(*_: object) -> None:
        raise _Terminated

    is_free = threading.current_thread() is threading.main_thread()
    is_free = is_free and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if is_free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def at_least(minimum: int) -> Callable[[str], int]:
    """An argument type: a whole number of at least ``minimum``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return value

    return parse


def num_nodes(text: str) -> int | None:
    """An argument type: a whole number of draft nodes, or ``auto``, which is None."""
    return None if text == AUTO else at_least(1)(text)
