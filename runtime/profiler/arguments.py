"""What the command lines of the profiler and the benchmarks share: arguments, and the files they write."""

import argparse
import os
from pathlib import Path
from typing import Any

from runtime.core.bundle import MAX_NUM_NODES
from runtime.core.cli import AUTO, at_least, output_problem
from runtime.core.errors import UserError

# The names in ``runtime.core.baselines``, which imports numba.
SEARCH_NAMES = ("prefix", "paper", "uncollapsed", "medusa")
# Names of before, which are accepted and not shown.
OLD_NAMES = {"--search": "--transform"}
SHARED: dict[str, dict[str, Any]] = {
    "--bundle": {"type": Path, "required": True, "help": "engine bundle"},
    "--prompts": {
        "type": Path,
        "nargs": "+",
        "required": True,
        "help": "jsonl; turns, question, prompt, messages, conversations or text",
    },
    "--max-prompts": {"type": at_least(1), "help": "use so many prompts from the beginning of a file"},
    "--max-new-tokens": {"type": at_least(2), "default": 128, "help": "tokens per prompt"},
    "--repeats": {
        "type": at_least(1),
        "default": 1,
        "help": "runs per prompt and setting; their median counts",
    },
    "--threads": {"type": at_least(1), "help": "threads per engine (default: the available cores)"},
    "--search": {"choices": SEARCH_NAMES, "default": "prefix", "help": "from a lattice to a tree"},
    "--out": {"type": Path, "required": True},
}


def add_arguments(parser: argparse.ArgumentParser, *names: str, **settings: Any) -> None:
    """Add arguments by name; ``settings`` are for ``add_argument`` and replace those in ``SHARED``."""
    for name in names:
        found = {**SHARED.get(name, {}), **settings}
        if found.get("default") is not None:
            found["help"] += " (default %(default)s)"
        parser.add_argument(name, **found)
        if name in OLD_NAMES:
            hidden = dict.fromkeys(("default", "help"), argparse.SUPPRESS)
            parser.add_argument(OLD_NAMES[name], **{**found, **hidden, "dest": name.removeprefix("--")})


def node_counts(text: str) -> list[int]:
    """An argument type: "16,8,8" -> [8, 16]."""
    counts = sorted({at_least(1)(part.strip()) for part in text.split(",")})
    if counts[-1] > MAX_NUM_NODES:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_NUM_NODES} nodes, got {counts[-1]}")
    return counts


def node_counts_or_auto(text: str) -> list[int | str]:
    """The same, and ``AUTO`` may be among them: "8,auto,4" -> [4, 8, "auto"]."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part != AUTO]
    counts = node_counts(",".join(numbers)) if numbers else []
    return [*counts, *([AUTO] if AUTO in parts else [])]


def check_out(out: Path) -> None:
    """Raise UserError if ``out`` cannot be a directory that can be written; creates nothing."""
    if problem := output_problem(out):
        raise UserError(f"--out {out}: {problem}")


def write_files(directory: Path, texts: dict[str, str]) -> list[Path]:
    """Write all files or none: each to a temporary name first, then renamed into place."""
    directory.mkdir(parents=True, exist_ok=True)
    staged = [(directory / f".{name}.{os.getpid()}.tmp", directory / name) for name in texts]
    try:
        for (temporary, _), text in zip(staged, texts.values(), strict=True):
            temporary.write_text(text, encoding="utf-8")
        for temporary, path in staged:
            temporary.replace(path)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)
    return [path for _, path in staged]
