"""The look of all figures: standalone SVG on white, colours that colour-blind readers tell apart."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's, without the yellow that vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
INK, GRID = "#333333", "#DDDDDD"
PANEL_INCHES = (4.4, 3.3)
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
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
    "svg.fonttype": "path",
    # The same numbers give the same file.
    "svg.hashsalt": "benchmarks",
}


@contextmanager
def panels(titles: Sequence[str]) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure with one panel a title, at most two in a row; the style holds inside the block."""
    columns = min(2, len(titles))
    lines = math.ceil(len(titles) / columns)
    # From the library's defaults, whatever the user's own settings are.
    with mpl.rc_context({**mpl.rcParamsDefault, **STYLE}):
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * columns + 1.6, height * lines), layout="constrained")
        FigureCanvasSVG(figure)
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for unused in axes[len(titles) :]:
            unused.remove()
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(title, loc="left")
        yield figure, axes[: len(titles)]


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dash of every name; no two of the first 56 look alike."""
    return {
        name: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": "-" if index < len(COLOURS) else "--",
        }
        for index, name in enumerate(dict.fromkeys(names))
    }


def add_legend(figure: Figure, styles: Mapping[str, Mapping[str, Any]], title: str | None = None) -> None:
    """The names beside the panels, in the order of ``styles``."""
    handles = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside right upper", title=title, alignment="left")


def svg_text(figure: Figure) -> str:
    """The figure as an SVG file's text; call it inside ``panels``."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()
