"""What every command line of the project shares: names, exit statuses, parsers and argument types."""

import argparse
import errno
import io
import math
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from runtime.core.errors import CacheMemoryError, DeviceError, UserError

EXIT_DEVICE_ERROR, EXIT_USER_ERROR, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143
# The number of draft nodes with which every step verifies as many as pay for themselves.
AUTO = "auto"
MAX_PORT = 65535
# Failures of the file system that the user can mend; any other OSError is a defect and keeps its traceback.
REFUSALS = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some space and run the same command again",
    errno.EFBIG: "write to a file system that takes larger files",
    errno.EROFS: "write to another directory",
    errno.EACCES: "write to another directory, or change its permissions",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# Options whose flags have other names than the fields of the errors about them.
FLAGS = {"num_threads": "--threads", "stop_strings": "--stop"}
_STARTED_AS: ContextVar[str | None] = ContextVar("started_as", default=None)


@contextmanager
def started_as(name: str) -> Iterator[None]:
    """Within the block usage and error lines begin with ``name``, such as ``ctc build``."""
    token = _STARTED_AS.set(name)
    try:
        yield
    finally:
        _STARTED_AS.reset(token)


class Parser(argparse.ArgumentParser):
    """A command's parser: an error is one line that begins with the command's name, and status 2.

    The help text shows the defaults that it does not already name.
    """

    def __init__(self, name: str, module: str, doc: str | None, *, allow_abbrev: bool = True):
        """name: begins error lines; module: what ``python -m`` runs; doc: the description, with examples"""
        program = _STARTED_AS.get() or f"python -m {module}"
        text = (doc or "").replace(f"python -m {module} ", f"{program} ")
        super().__init__(
            prog=program, description=text, formatter_class=_HelpFormatter, allow_abbrev=allow_abbrev
        )
        self.name = _STARTED_AS.get() or name

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.type is Path and not arg_string:
            # Path("") is the current directory, which an unset variable in a script does not mean.
            raise argparse.ArgumentError(action, "must not be empty")
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        line = message.removeprefix("argument ")
        self.exit(EXIT_USER_ERROR, f"{self.name}: {line} (see {self.prog} --help)\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        """Show the arguments that must be given; all others are listed below the usage."""
        groups = [group for group in groups if group.required]
        in_groups = [action for group in groups for action in group._group_actions]
        must = [a for a in actions if a.required or not a.option_strings or a in in_groups]
        return super()._format_usage(usage, must, groups, prefix).rstrip() + " [options]\n\n"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_value = action.option_strings and action.nargs != 0 and action.default not in (None, [], "", ())
        if is_value and action.default != argparse.SUPPRESS and "default" not in text:
            text += " (default %(default)s)"
        return text


def output_problem(directory: Path) -> str | None:
    """Why a directory cannot be made, or be written if it is there; None if it can. Leaves nothing behind.

    Permissions do not say it: root has them in file systems that take no files.
    """
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is a file; expected a directory"
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError:
        return f"{there} cannot be written; expected a directory that can"


def exit_status(
    name: str, command: Callable[[], int], *, interrupted: str | Callable[[], str] = "interrupted"
) -> int:
    """Run a command and return its exit status.

    A UserError becomes one line on stderr and status 2. A DeviceError or CacheMemoryError becomes one line
    and status 1, because the same command may succeed on another device. Ctrl-C becomes the line
    ``interrupted`` and status 130, SIGTERM the same line and status 143. ``interrupted`` is a function where
    its line depends on how far the command came. A full disk, or a place that cannot be written, is one line
    and status 2. A closed pipe on stdout, whose reader has gone, ends the command silently with status 1.
    """
    name = _STARTED_AS.get() or name
    _open_streams()
    try:
        with _termination_interrupts():
            status = command()
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        _forget_output()
        return 1
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}{os.strerror(error.errno)}; {REFUSALS[error.errno]}", file=sys.stderr)
        _forget_output()
        return EXIT_USER_ERROR
    except UserError as error:
        text = f"{FLAGS[error.field]}: {error.problem}" if error.field in FLAGS else error
        print(f"{name}: {text}", file=sys.stderr)
        return EXIT_USER_ERROR
    except (DeviceError, CacheMemoryError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_DEVICE_ERROR
    except KeyboardInterrupt as stop:
        print(f"{name}: {interrupted() if callable(interrupted) else interrupted}", file=sys.stderr)
        return EXIT_TERMINATED if isinstance(stop, Terminated) else EXIT_INTERRUPTED


def _open_streams() -> None:
    """Make stdout UTF-8, whatever the locale says, and open the null device where a stream is closed."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors=sys.stdout.errors)


def _forget_output() -> None:
    """Send the rest of stdout to the null device; Python flushes it at exit and would fail once more."""
    with suppress(OSError, ValueError):  # ValueError: stdout has no file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def coloured(wanted: bool) -> bool:
    """Whether to write colours: on a terminal only, and not where NO_COLOR is set (https://no-color.org)."""
    return wanted and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that a command removes what it has half-written.

    A command that goes on after Ctrl-C must not catch it.
    """


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, unless the program handles it in its own way."""

    def interrupt(*_: object) -> None:
        raise Terminated

    is_free = threading.current_thread() is threading.main_thread()
    is_free = is_free and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if is_free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def directory_name(path: Path) -> str:
    """The name of a directory that may be given as ".." or "."; a link keeps its own name."""
    return Path(os.path.normpath(path.absolute())).name


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


def positive(text: str) -> float:
    """An argument type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def not_empty(text: str) -> str:
    """An argument type: a text that is not empty, as that of a variable is which is not set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"must not be empty, got {text!r}")
    return text


def grpc_address(text: str) -> str:
    """An argument type: the address of a gRPC server."""
    if "://" in not_empty(text):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    return text


def port(text: str) -> int:
    """An argument type: the number of a port."""
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a whole number between 1 and {MAX_PORT}, got {text!r}")
    return value


def num_nodes(text: str) -> int | None:
    """An argument type: a whole number of draft nodes, or ``auto``, which is None."""
    return None if text == AUTO else at_least(1)(text)
