"""The figures of a comparison, as SVG texts: methods against tree size, draft time and training steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from benchmarks.methods.heads import split_seed
from benchmarks.plot_style import add_legend, looks, panels, svg_text

Row = Mapping[str, Any]
BETA_LABEL = "tokens per verify step (beta)"


def beta_by_nodes(methods: Sequence[Row]) -> str:
    """beta against draft nodes, one line a method, one panel a prompt file; bars from seed to seed.

    methods: from ``method_table.aggregate``
    """
    styles = _best_first(methods)
    with panels(_unique(row["prompts"] for row in methods)) as (figure, axes):
        for axis, series in zip(axes, _by_file(methods), strict=True):
            for name, rows in series.items():
                nodes = [row["nodes"] for row in rows]
                _line(axis, nodes, rows, styles[name])
            axis.set_xscale("log", base=2)
            ticks = sorted({row["nodes"] for rows in series.values() for row in rows})
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_xticks([], minor=True)
            axis.set_xlabel("draft nodes a step")
            axis.set_ylabel(BETA_LABEL)
        add_legend(figure, styles)
        return svg_text(figure)


def beta_by_draft_time(methods: Sequence[Row]) -> str:
    """beta against the time of a draft, one line a method; large markers at the largest tree."""
    styles = _best_first(methods)
    largest = max(row["nodes"] for row in methods)
    with panels(_unique(row["prompts"] for row in methods)) as (figure, axes):
        for axis, series in zip(axes, _by_file(methods), strict=True):
            for name, rows in series.items():
                look = styles[name]
                times = [row["draft_ms"]["mean"] for row in rows]
                _line(axis, times, rows, {**look, "linestyle": "-"}, linewidth=0.8, markersize=3)
                axis.plot(
                    times[-1], rows[-1]["beta"]["mean"], color=look["color"], marker=look["marker"], ms=8
                )
            axis.set_xlim(left=0)
            axis.set_xlabel("median time until the tree is ready, ms")
            axis.set_ylabel(BETA_LABEL)
        dots = {name: {**look, "linestyle": "none"} for name, look in styles.items()}
        add_legend(figure, dots, f"large: {largest} nodes")
        return svg_text(figure)


def learning_curves(curves: Mapping[str, Sequence[Row]]) -> str:
    """Held-out tokens per step during training, one line a head; seeds of a method look alike.

    curves: name of a head's directory -> rows with step and beta
    """
    methods = {name: split_seed(name)[0] for name in curves}
    styles = looks(list(methods.values()))
    with panels(["held-out text during training"]) as (figure, axes):
        for name, rows in curves.items():
            look = {**styles[methods[name]], "marker": ""}
            axes[0].plot([row["step"] for row in rows], [row["beta"] for row in rows], **look)
            last = rows[-1]
            axes[0].plot(last["step"], last["beta"], **{**styles[methods[name]], "linestyle": "none"})
        axes[0].set_xlim(left=0)
        axes[0].set_xlabel("optimizer step")
        axes[0].set_ylabel("estimated tokens per step")
        add_legend(figure, styles)
        return svg_text(figure)


def _line(
    axis: Axes, xs: Sequence[float], rows: Sequence[Row], look: Mapping[str, Any], **extra: Any
) -> None:
    """Means, with bars from the lowest to the highest seed where there are several."""
    means = [row["beta"]["mean"] for row in rows]
    axis.plot(xs, means, **look, **extra)
    if any(len(row["heads"]) > 1 for row in rows):
        lows, highs = ([row["beta"][end] for row in rows] for end in ("min", "max"))
        axis.vlines(xs, lows, highs, color=look["color"], linewidth=1.2)


def _best_first(methods: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Looks in the order given, listed as the lines end in the first panel: the highest first."""
    names = _unique(row["method"] for row in methods)
    styles = looks(names)
    last = {row["method"]: row["beta"]["mean"] for row in methods if row["prompts"] == methods[0]["prompts"]}
    return {name: styles[name] for name in sorted(names, key=lambda name: -last[name])}


def _by_file(methods: Sequence[Row]) -> list[dict[str, list[Row]]]:
    """For every prompt file, a method's rows by tree size."""
    files: dict[str, dict[str, list[Row]]] = {}
    for row in sorted(methods, key=lambda row: row["nodes"]):
        files.setdefault(row["prompts"], {}).setdefault(row["method"], []).append(row)
    return [files[name] for name in _unique(row["prompts"] for row in methods)]


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
