"""The files of a benchmark, with the command, the machine and the versions: numbers, tables and figures."""

import argparse
import importlib.util
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.bundle import Bundle
from runtime.core.errors import UserError
from runtime.profiler.arguments import write_files
from runtime.profiler.environment import describe_bundle, machine, versions

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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

    The command, the machine, the versions and, if given, the bundle are added to the report.
    """
    found = {**report, "command": args.command, "machine": machine(getattr(args, "threads", None))}
    found["versions"] = versions()
    if bundle is not None:
        found["bundle"] = describe_bundle(bundle)
    return write_files(args.out, {name: json.dumps(found, indent=1, allow_nan=False) + "\n", **(texts or {})})


# Okabe and Ito's, without the yellow that vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
INK, GRID = "#333333", "#DDDDDD"
PANEL_INCHES = (4.4, 3.3)
INKED = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(INKED, INK),
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "figure.constrained_layout.wspace": 0.05,
    "figure.constrained_layout.hspace": 0.05,
    # The same numbers give the same file.
    "svg.hashsalt": "benchmarks",
}


def require_matplotlib() -> None:
    """Raise UserError if matplotlib is missing: now, not when everything has been measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the figures need matplotlib: pip install -c constraints.txt -e '.[bench]'")


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and dash of every name; no two of the first 56 look alike."""
    return {
        name: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": "-" if index < len(COLOURS) else "--",
        }
        for index, name in enumerate(dict.fromkeys(names))
    }


def draw(
    titles: Sequence[str],
    fill: Callable[[Sequence["Axes"]], None],
    styles: Mapping[str, Mapping[str, Any]],
    *,
    legend_title: str | None = None,
) -> str:
    """Draw a figure and return the text of its SVG file: one panel a title, at most two side by side.

    fill: draws into the panels
    styles: names in the legend, in this order, and their looks
    """
    # Imported here because it takes a second.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(2, len(titles))
    lines = math.ceil(len(titles) / columns)
    width, height = PANEL_INCHES
    stream = io.StringIO()
    # Figures look the same whatever the user's own matplotlib settings are.
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        figure = Figure(figsize=(width * columns + 1.6, height * lines), layout="constrained")
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for unused in axes[len(titles) :]:
            unused.remove()
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(title, loc="left")
        fill(axes[: len(titles)])
        handles = [Line2D([], [], label=name, **style) for name, style in styles.items()]
        figure.legend(handles=handles, loc="outside right upper", title=legend_title, alignment="left")
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
