"""``methods.md`` and ``methods.json``: the numbers of a comparison as tables and as one object."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.methods.heads import PLAIN
from benchmarks.methods.table import best_sizes

Row = Mapping[str, Any]

NOTES = """\
* **beta** is tokens emitted by verify steps per verify step. The first token, which comes from reading the
  prompt, is not counted, nor are tokens beyond the limit.
* **Paper's count** is what the seed paper publishes as beta: tokens divided by the index of the last step,
  which starts at zero, so by one step too few; the mean over prompts. It serves comparison with that
  paper's tables only.
* **gamma** is plain decoding's time per token over the method's, reading the prompt left out. Every prompt
  was decoded by plain decoding and by all methods in turn.
* **draft** is the time from a step's beginning until its tree can be verified, all passes of the head and
  the transform included; **verify** that of the backbone's pass. Both are medians over steps.
* **identical** counts prompts whose output is plain decoding's, token for token. At a tie the logits of the
  two tokens differ by no more than 1e-4.
* Several seeds of a method are given as mean (lowest..highest); of a ratio of betas, the lowest over the
  other's highest and the highest over the other's lowest. Ratios are means over the prompt files. Of a
  prompt with several turns the first is used."""


def markdown(report: Row) -> str:
    """The whole ``methods.md``; ``report`` as in ``methods.json``."""
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
        "![beta against nodes](beta_nodes.svg) ![beta against draft time](beta_draft.svg)",
    ]
    if report["ratios"]:
        parts += [f"## beta of {report['ratios'][0]['method']} over the others'", ratio_table(report)]
    if any(len(row["heads"]) > 1 for row in report["methods"]):
        parts += ["## Every seed", seed_table(report)]
    for prompts, table in report["categories"].items():
        parts += [f"## beta by category: {prompts}, {largest} nodes", category_table(table)]
    parts += [f"## Accepted at depth, {largest} nodes", depth_table(report, largest)]
    if report["curves"]:
        parts += ["## Training", curve_table(report), "![learning curves](curves.svg)"]
    return "\n\n".join(parts) + "\n"


def main_table(report: Row) -> str:
    """Methods by prompt file and tree size."""
    header = [
        "prompts", "method", "parameters", "nodes", "beta", "beta (paper's count)", "gamma", "draft ms",
        "verify ms", "identical",
    ]  # fmt: skip
    lines = []
    for plain in report["plain"]:
        lines.append([plain["prompts"], PLAIN, "", "", "1", "", "1", "", f"{plain['verify_ms']:.2f}", ""])
        for row in report["methods"]:
            if row["prompts"] == plain["prompts"]:
                lines.append(
                    [
                        row["prompts"],
                        row["method"],
                        f"{row['params'] / 1e6:.2f}M",
                        str(row["nodes"]),
                        *(
                            _spread(row[key])
                            for key in ("beta", "beta_paper", "gamma", "draft_ms", "verify_ms")
                        ),
                        _identical(row),
                    ]
                )
    return table(header, lines)


def best_table(report: Row) -> str:
    """Every method at the tree size that is fastest for it."""
    return table(
        ["prompts", "method", "nodes", "gamma", "beta", "draft ms"],
        [
            [
                row["prompts"],
                row["method"],
                str(row["nodes"]),
                *(_spread(row[key]) for key in ("gamma", "beta", "draft_ms")),
            ]
            for row in best_sizes(report["methods"])
        ],
    )


def ratio_table(report: Row) -> str:
    """The first method's beta over every other's by tree size, the mean over the prompt files.

    In brackets, with several seeds: the lowest seed over the other's highest, and the other way round.
    """
    sizes = [str(entry["nodes"]) for entry in report["ratios"][0]["by_nodes"]]
    return table(
        ["method", *(f"{size} nodes" for size in sizes), "mean"],
        [
            [row["other"], *(_spread(entry) for entry in row["by_nodes"]), f"{row['mean']:.2f}"]
            for row in report["ratios"]
        ],
    )


def seed_table(report: Row) -> str:
    """One line a head, for methods of several seeds."""
    several = {label for row in report["methods"] if len(row["heads"]) > 1 for label in row["heads"]}
    return table(
        ["prompts", "head", "nodes", "beta", "gamma", "draft ms", "verify ms", "identical"],
        [
            [
                row["prompts"],
                row["method"],
                str(row["nodes"]),
                *(f"{row[key]:.2f}" for key in ("beta", "gamma", "draft_ms", "verify_ms")),
                _identical(row),
            ]
            for row in report["details"]
            if row["method"] in several
        ],
    )


def category_table(categories: Mapping[str, Mapping[str, float]]) -> str:
    """beta by method and category of prompts."""
    names = sorted({name for row in categories.values() for name in row})
    return table(
        ["method", *names],
        [
            [method, *(f"{row[name]:.2f}" if name in row else "" for name in names)]
            for method, row in categories.items()
        ],
    )


def depth_table(report: Row, nodes: int) -> str:
    """Share of the steps whose draft was accepted at least so deep."""
    rows = [row for row in report["methods"] if row["nodes"] == nodes]
    deepest = max(len(row["acceptance_by_depth"]) for row in rows)
    lines = []
    for row in rows:
        shares = [f"{share:.2f}" for share in row["acceptance_by_depth"]]
        lines.append([row["prompts"], row["method"], *shares, *[""] * (deepest - len(shares))])
    return table(["prompts", "method", *(str(depth) for depth in range(1, deepest + 1))], lines)


def curve_table(report: Row) -> str:
    """Where every head's training stood at its middle and its end; beta estimated on held-out text."""
    lines = []
    for label, curve in report["curves"].items():
        last = curve[-1]
        middle = min(curve, key=lambda row: abs(row["step"] - last["step"] / 2))
        lines.append([label, str(last["step"]), f"{middle['beta']:.2f}", f"{last['beta']:.2f}"])
    return table(["head", "steps", "beta halfway", "beta at the end"], lines)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = ["---"] * len(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def _spread(value: Mapping[str, float] | None) -> str:
    if value is None:
        return ""
    mean, low, high = (f"{value[name]:.2f}" for name in ("mean", "min", "max"))
    return mean if low == high else f"{mean} ({low}..{high})"


def _identical(row: Row) -> str:
    notes = [f"{row['ties']} at a tie"] if row["ties"] else []
    notes += [f"**{row['mismatches']} wrong**"] if row["mismatches"] else []
    return ", ".join([row["lossless"], *notes])
