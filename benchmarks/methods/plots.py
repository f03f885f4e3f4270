"""The figures of a comparison, as SVG texts: methods against tree size and draft time."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.figures import draw, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
Series = dict[str, list[Row]]
ACCEPTANCE_LABEL = "tokens per verify step (beta)"


def acceptance_by_nodes(methods: Sequence[Row]) -> str:
    """Draw acceptance length against draft nodes, one line a method, one panel a prompt file.

    methods: from ``table.aggregate``; bars go from the lowest to the highest seed
    """
    styles = _best_first(methods)

    def fill(axes: Sequence["Axes"]) -> None:
        for axis, series in zip(axes, _by_file(methods).values(), strict=True):
            for name, rows in series.items():
                _line(axis, [row["nodes"] for row in rows], rows, styles[name])
            axis.set_xscale("log", base=2)
            ticks = sorted({row["nodes"] for rows in series.values() for row in rows})
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_xticks([], minor=True)
            axis.set(xlabel="draft nodes a step", ylabel=ACCEPTANCE_LABEL)

    return draw(list(_by_file(methods)), fill, styles)


def acceptance_by_draft_time(methods: Sequence[Row]) -> str:
    """Draw acceptance length against the time of a draft; large markers stand at the largest tree."""
    styles = _best_first(methods)

    def fill(axes: Sequence["Axes"]) -> None:
        for axis, series in zip(axes, _by_file(methods).values(), strict=True):
            for name, rows in series.items():
                look = {**styles[name], "linestyle": "-"}
                times = [row["draft_ms"]["mean"] for row in rows]
                _line(axis, times, rows, look, linewidth=0.8, markersize=3)
                axis.plot(times[-1], rows[-1]["beta"]["mean"], **look, markersize=8)
            axis.set_xlim(left=0)
            axis.set(xlabel="median time until the tree is ready, ms", ylabel=ACCEPTANCE_LABEL)

    markers = {name: {**look, "linestyle": "none"} for name, look in styles.items()}
    largest = max(row["nodes"] for row in methods)
    return draw(list(_by_file(methods)), fill, markers, legend_title=f"large: {largest} nodes")


def _line(
    axis: "Axes", xs: Sequence[float], rows: Sequence[Row], look: Mapping[str, Any], **extra: Any
) -> None:
    """Draw the means, with bars from the lowest to the highest seed where there are several."""
    axis.plot(xs, [row["beta"]["mean"] for row in rows], **look, **extra)
    if any(len(row["heads"]) > 1 for row in rows):
        lows, highs = ([row["beta"][end] for row in rows] for end in ("min", "max"))
        axis.vlines(xs, lows, highs, color=look["color"], linewidth=1.2)


def _best_first(methods: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return looks by method; the method whose line ends highest in the first panel comes first."""
    styles = looks([row["method"] for row in methods])
    last = {row["method"]: row["beta"]["mean"] for row in methods if row["prompts"] == methods[0]["prompts"]}
    return {name: styles[name] for name in sorted(styles, key=lambda name: -last[name])}


def _by_file(methods: Iterable[Row]) -> dict[str, Series]:
    """Return the rows of every prompt file and method, by tree size."""
    files: dict[str, Series] = {row["prompts"]: {} for row in methods}
    for row in sorted(methods, key=lambda row: row["nodes"]):
        files[row["prompts"]].setdefault(row["method"], []).append(row)
    return files
