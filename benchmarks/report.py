"""Tables of the benchmarks' reports, and files with the command, the machine and the versions."""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.core.bundle import Bundle
from runtime.profiler.arguments import write_files
from runtime.profiler.environment import describe_bundle, machine, versions


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Example: ["a", "b"], [["1", "2"]] -> lines "| a | b |", "| --- | --- |", "| 1 | 2 |"."""
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def print_result(result: Mapping[str, Any]) -> None:
    """Print a line for every number, and one JSON object as the last line."""
    for name, value in result.items():
        print(f"{name:26} {value}")
    print(json.dumps(result))


def write_report(
    args: argparse.Namespace,
    name: str,
    report: Mapping[str, Any],
    *,
    bundle: Bundle | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write the report as the JSON file ``name`` and other texts by file name; returns the paths.

    The machine, the versions and, if given, the bundle are added to the report.
    """
    found = {**report, "machine": machine(getattr(args, "threads", None)), "versions": versions()}
    if bundle is not None:
        found["bundle"] = describe_bundle(bundle)
    return write_files(args.out, {name: json.dumps(found, indent=1, allow_nan=False) + "\n", **(texts or {})})
