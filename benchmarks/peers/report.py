"""The table and the figure of a comparison of engines."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.peers.engines import METHODS, PRECISIONS
from benchmarks.report import COLOURS, draw, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = (
    "engine",
    "precision",
    "weights there",
    "method",
    "ms per token",
    "quartiles",
    "prompt tokens per s",
    "tokens",
    "same tokens",
    "resident MB",
)
NOTES = """Greedy decoding of one text at a time on the processor. ms per token is the median over prompts
of the time from the first token to the last, by the number of tokens after the first: the prompt has been
read by then. Every engine was given the same token ids and wrote the same number of tokens, whatever they
are: no token ends a text. Prompt tokens per s are those until the first token comes. The prompts were
decoded in turns. Same tokens are those before the first difference from ours-plain in the same precision.
Resident memory is that of the engine's process, mapped files included."""


def markdown(report: Mapping[str, Any]) -> str:
    """The tables, one a precision together, with what was left out."""
    lines = [[_cell(row, name) for name in HEADER] for row in report["rows"]]
    versions = [f"{name} {version}" for name, version in report["engine_versions"].items()]
    settings = report["settings"]
    parts = [
        "# Engines side by side",
        NOTES,
        f"{settings['prompts']} prompts, half of them with up to {settings['prompt_tokens']:.0f} tokens, "
        f"{settings['max_new_tokens']} new tokens, {settings['threads']} threads; {', '.join(versions)}.",
        markdown_table(HEADER, lines),
    ]
    if report["left_out"]:
        parts.append("Left out:\n\n" + "\n".join(f"- {line}" for line in report["left_out"]))
    return "\n\n".join(parts) + "\n"


def _cell(row: Mapping[str, Any], name: str) -> str:
    keys = {"weights there": "form", "resident MB": "resident_mb"}
    value = row[keys.get(name, name.replace(" ", "_"))]
    if value is None or value == [None, None]:
        return "?"
    if name == "quartiles":
        return f"{value[0]:.2f} to {value[1]:.2f}"
    if name == "ms per token":
        return f"{value:.2f}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def figure(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds per token as bars with quartiles, a panel for each precision; the text of an SVG file."""
    groups = {
        precision: [row for row in rows if row["precision"] == precision and row["ms_per_token"] is not None]
        for precision in PRECISIONS
    }
    panels = {precision: group for precision, group in groups.items() if group} or {"nothing measured": []}
    styles = {
        method: {"color": COLOURS[index], "marker": "s", "linestyle": ""}
        for index, method in enumerate(METHODS)
    }

    def fill(axes: Sequence["Axes"]) -> None:
        for axis, group in zip(axes, panels.values(), strict=True):
            # The fastest is on top.
            ordered = sorted(group, key=lambda row: row["ms_per_token"], reverse=True)
            places = range(len(ordered))
            middle = [row["ms_per_token"] for row in ordered]
            spread = [
                [row["ms_per_token"] - row["quartiles"][0] for row in ordered],
                [row["quartiles"][1] - row["ms_per_token"] for row in ordered],
            ]
            colours = [COLOURS[METHODS.index(row["method"])] for row in ordered]
            axis.barh(places, middle, xerr=spread, color=colours, height=0.7)
            axis.set_yticks(places, [row["engine"] for row in ordered])
            axis.set_xlabel("ms per token")
            axis.grid(axis="y", visible=False)

    return draw(list(panels), fill, styles, legend_title="method")
