"""What the benchmarks' command lines share: arguments, exit statuses, one line for a bad argument."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from runtime.cli import at_least
from runtime.decoder import MAX_NUM_NODES
from runtime.errors import UserError
from runtime.text.prompts import Prompt, read_prompts


class Parser(argparse.ArgumentParser):
    """Raises UserError where argparse prints its usage and exits."""

    def __init__(self, prog: str, doc: str | None):
        super().__init__(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def node_counts(text: str) -> tuple[int, ...]:
    """An argument type: "16,8,8" -> (8, 16)."""
    counts = tuple(sorted({at_least(1)(part.strip()) for part in text.split(",")}))
    if counts[-1] > MAX_NUM_NODES:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_NUM_NODES} nodes, got {counts[-1]}")
    return counts


def read_prompt_files(paths: Sequence[Path], limit: int | None) -> dict[str, list[Prompt]]:
    """The first ``limit`` prompts of every file by its name without suffix, the label in all tables.

    Raises UserError for a file that cannot be used and for two of one name.
    """
    files: dict[str, list[Prompt]] = {}
    for path in paths:
        if path.stem in files:
            raise UserError(f"--prompts: two files are named {path.stem}; give one of them another name")
        files[path.stem] = read_prompts(path)[:limit]
    return files


def require_matplotlib() -> None:
    """Raises UserError now, rather than when everything has been measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the figures need matplotlib: pip install -c constraints.txt -e '.[bench]'")


def check_out(out: Path) -> None:
    """Raises UserError when ``out`` cannot be a directory; creates nothing."""
    blocked = next((path for path in (out, *out.parents) if path.exists()), None)
    if blocked is not None and not blocked.is_dir():
        raise UserError(f"--out {out}: {blocked} is a file; expected a directory")
