"""Shared parts of the benchmarks' command lines: arguments, exit statuses, one line for a bad argument."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from runtime.core import cli
from runtime.core.errors import UserError
from runtime.core.prompts import Prompt, read_prompts, read_text
from runtime.profiler.arguments import add_arguments, check_out

Number = TypeVar("Number", int, float)


class Parser(cli.Parser):
    """A benchmark's command line; raises UserError for a bad argument."""

    def __init__(self, module: str, doc: str | None):
        super().__init__(module.rpartition(".")[2], module, doc)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))

    def add(self, *names: str, **settings: Any) -> None:
        add_arguments(self, *names, **settings)

    def run(
        self,
        command: Callable[[argparse.Namespace], int],
        argv: list[str] | None,
        *,
        interrupted: str = "interrupted",
    ) -> int:
        """Parse the arguments, call ``command`` with them and return the exit status.

        The status is the command's own, 2 for input that cannot be used, 130 for Ctrl-C. ``args.command``
        holds the whole command line.
        """
        argv = sys.argv[1:] if argv is None else argv

        def parse_and_run() -> int:
            args = self.parse_args(argv)
            args.command = shlex.join([*self.prog.split(), *argv])
            if "out" in args:
                check_out(args.out)
            return command(args)

        return cli.exit_status(self.name, parse_and_run, interrupted=interrupted)


def numbers(kind: Callable[[str], Number]) -> Callable[[str], list[Number]]:
    """An argument type: "4,1,4" -> [1, 4]. ``kind`` is the type of each, such as ``at_least(1)``."""
    return lambda text: sorted({kind(part.strip()) for part in text.split(",")})


def names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """An argument type: "b,a" -> ["a", "b"], if these names are known, in the order of ``known``."""
    known = list(known)

    def parse(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",")]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(known)}, got {name!r}")
        return [name for name in known if name in given]

    return parse


def read_prompt_files(paths: Sequence[Path], limit: int | None) -> dict[str, list[Prompt]]:
    """Read the first ``limit`` prompts of every file, by the file's name without suffix, its label in tables.

    Raises UserError for a file that cannot be used and for two of one name.
    """
    files: dict[str, list[Prompt]] = {}
    for path in paths:
        if path.stem in files:
            raise UserError(f"--prompts: two files are named {path.stem}; give one of them another name")
        files[path.stem] = read_prompts(path)[:limit]
    return files


def all_prompts(paths: Sequence[Path], limit: int | None) -> list[Prompt]:
    """The first ``limit`` prompts of every file."""
    return [prompt for path in paths for prompt in read_prompts(path)[:limit]]


def read_json(path: Path, argument: str) -> dict[str, Any]:
    """Read a JSON object. Raises UserError, which names the argument, if the file holds something else."""
    try:
        values = json.loads(read_text(argument, path))
    except ValueError as error:
        raise UserError(f"{argument}: {path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{argument}: {path} must hold a JSON object")
    return values
