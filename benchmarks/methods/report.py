"""The tables of ``methods.md`` and the figures of a comparison, from the numbers in ``methods.json``."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.methods.table import SPREAD_KEYS, best_sizes
from benchmarks.report import draw, looks, markdown_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Row = Mapping[str, Any]

NOTES = """\
* **Acceptance length (beta)** is tokens emitted by verify steps per verify step. The first token, which
  comes from reading the prompt, is not counted, nor are tokens beyond the limit.
* **The paper's count** is what the seed paper publishes as beta: tokens divided by the index of the last
  step, which starts at zero, so by one step too few; the mean over prompts. It serves comparison with that
  paper's tables only.
* **Speedup (gamma)** is plain decoding's time per token over the method's, reading the prompt left out.
  Every prompt was decoded by plain decoding and by all methods in turn.
* **Draft** is the time from a step's beginning until its tree can be verified, all passes of the head and
  the search included; **verify** that of the target model's pass. Both are medians over steps.
* **Streams** draft in the pass that verifies, so that their draft is the search alone. A head that fine-tunes
  the target model is compared with plain decoding of that model (`plain of NAME`), in speed and output.
* **Identical** counts prompts whose output is plain decoding's, token for token. At a tie the logits of the
  two tokens differ by no more than 1e-4.
* Several seeds of a method are given as mean (lowest..highest); of a ratio, the lowest seed over the other's
  highest and the highest over the other's lowest. Ratios are means over the prompt files. Of a prompt with
  several turns the first is used."""
# Headings of SPREAD_KEYS, in their order.
SPREAD_HEADER = [
    "acceptance length (beta)", "beta, the paper's count", "speedup (gamma)", "draft ms", "verify ms"
]  # fmt: skip
Series = dict[str, list[Row]]
ACCEPTANCE_LABEL = "tokens per verify step (beta)"


def markdown(report: Row) -> str:
    """Return the text of ``methods.md``; ``report`` is the contents of ``methods.json``."""
    machine, versions = report["machine"], report["versions"]
    largest = max(row["nodes"] for row in report["rows"])
    parts = [
        "# Draft heads compared",
        f"```\n{report['command']}\n```",
        f"{machine['cpu']}, {machine['threads']} threads, ONNX Runtime {versions['onnxruntime']}; greedy, "
        f"at most {report['settings']['max_new_tokens']} new tokens.",
        main_table(report),
        NOTES,
        "## The best tree size",
        best_table(report),
        "![acceptance length against nodes](beta_nodes.svg) "
        "![acceptance length against draft time](beta_draft.svg)",
    ]
    if report["ratios"]:
        first = report["ratios"][0]["method"]
        parts += [f"## Acceptance length of {first} over the others'", ratio_table(report)]
    for prompts, table in report["categories"].items():
        parts += [f"## Acceptance length by category: {prompts}, {largest} nodes", category_table(table)]
    parts += [f"## Accepted at depth, {largest} nodes", depth_table(report, largest)]
    return "\n\n".join(parts) + "\n"


def main_table(report: Row) -> str:
    """Return the table of methods by prompt file and tree size."""
    lines = []
    for prompts in dict.fromkeys(plain["prompts"] for plain in report["plain"]):
        lines += [
            [prompts, plain["method"], "", "", "1", "", "1", "", f"{plain['verify_ms']:.2f}", ""]
            for plain in report["plain"]
            if plain["prompts"] == prompts
        ]
        lines += [
            [
                prompts,
                row["method"],
                f"{row['params'] / 1e6:.2f}M",
                str(row["nodes"]),
                *(_spread(row[key]) for key in SPREAD_KEYS),
                _identical(row),
            ]
            for row in report["methods"]
            if row["prompts"] == prompts
        ]
    return markdown_table(["prompts", "method", "parameters", "nodes", *SPREAD_HEADER, "identical"], lines)


def best_table(report: Row) -> str:
    """Return the table of methods, each at the tree size that is fastest for it."""
    return markdown_table(
        ["prompts", "method", "nodes", "speedup (gamma)", "acceptance length (beta)", "draft ms"],
        [
            [row["prompts"], row["method"], str(row["nodes"])]
            + [_spread(row[key]) for key in ("gamma", "beta", "draft_ms")]
            for row in best_sizes(report["methods"])
        ],
    )


def ratio_table(report: Row) -> str:
    """Return the table of the first method's acceptance length over every other's, by tree size.

    Ratios are means over the prompt files. With several seeds, brackets hold the lowest seed over the
    other's highest, and the other way round.
    """
    sizes = [f"{entry['nodes']} nodes" for entry in report["ratios"][0]["by_nodes"]]
    return markdown_table(
        ["method", *sizes, "mean"],
        [
            [row["other"], *(_spread(entry) for entry in row["by_nodes"]), f"{row['mean']:.2f}"]
            for row in report["ratios"]
        ],
    )


def category_table(categories: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of acceptance lengths by method and category of prompts."""
    names = sorted({name for row in categories.values() for name in row})
    return markdown_table(
        ["method", *names],
        [
            [method, *(f"{row[name]:.2f}" if name in row else "" for name in names)]
            for method, row in categories.items()
        ],
    )


def depth_table(report: Row, nodes: int) -> str:
    """Return the table of shares of the steps that accepted a draft at each depth."""
    rows = [row for row in report["methods"] if row["nodes"] == nodes]
    deepest = max(len(row["acceptance_by_depth"]) for row in rows)
    lines = []
    for row in rows:
        shares = [f"{share:.2f}" for share in row["acceptance_by_depth"]]
        lines.append([row["prompts"], row["method"], *shares, *[""] * (deepest - len(shares))])
    return markdown_table(["prompts", "method", *(str(depth) for depth in range(1, deepest + 1))], lines)


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    mean, low, high = (f"{value[name]:.2f}" for name in ("mean", "min", "max"))
    return mean if low == high else f"{mean} ({low}..{high})"


def _identical(row: Row) -> str:
    notes = [f"{row['ties']} at a tie"] if row["ties"] else []
    notes += [f"**{row['mismatches']} wrong**"] if row["mismatches"] else []
    return ", ".join([row["lossless"], *notes])


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
