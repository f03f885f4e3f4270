"""``streams.md`` and its figure: the results of the sweeps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.figures import draw, looks
from benchmarks.report import markdown_table
from benchmarks.streams.sweep import LAYERS, PRUNING, STREAMS
from export.options import OWN_PASS, VERIFY_PASS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
HEADER = (
    "prompts",
    "head",
    "pass",
    "N_s",
    "streams",
    "drafts kept",
    "tokens per step",
    "speedup",
    "layer evaluations a token",
    "draft ms",
    "verify ms",
    "identical",
)
TITLES = {
    LAYERS: "Upper layers that the streams pass (N_s)",
    STREAMS: "Streams of a node",
    PRUNING: "Pruning at layer N - N_s",
}
DASHES = {VERIFY_PASS: "-", OWN_PASS: "--"}
# Axes of the figure by sweep: the field that varies, and the label.
AXES = {
    LAYERS: ("num_layers", "upper layers N_s"),
    STREAMS: ("num_frames", "streams of a node"),
    PRUNING: ("kept_nodes", "drafts kept by pruning"),
}
NOTES = """\
* **Tokens per step** are those emitted by verify steps, per step; the first token, which comes from reading
  the prompt, is not counted. The paper's call-reduction ratio is the same.
* **Layer evaluations a token** count the rows that pass a layer in verify steps, tree nodes and streams, per
  token. Plain decoding has as many as the model has layers. Not counted are the products with the LM head:
  one for each kept node and each of its streams, and with pruning one more for each node.
* **Pass**: streams run in the pass that verifies, for every kept node, or in a pass of their own, for the
  last accepted token. Lines of the second are dashed in the figure.
* **Identical** counts prompts whose output is plain decoding's, token for token."""


def markdown(report: Row) -> str:
    """The text of ``streams.md``; ``report`` is the contents of ``streams.json``."""
    machine = report["machine"]
    parts = [
        "# Speculative streams, swept",
        f"```\n{report['command']}\n```",
        f"{machine['cpu']}, {machine['threads']} threads; greedy, trees of {report['nodes']} drafts.",
        NOTES,
        *(f"## {title}\n\n{table(report['rows'], sweep)}" for sweep, title in TITLES.items()),
        "![tokens per step and speedup](streams.svg)",
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row], sweep: str) -> str:
    """The rows of one sweep."""
    return markdown_table(
        HEADER,
        [
            [
                row["prompts"],
                row["head"],
                row["stream_pass"],
                str(row["num_layers"]),
                str(row["num_frames"]),
                "all" if row["kept_nodes"] is None else str(row["kept_nodes"]),
                *(f"{row[key]:.2f}" for key in ("beta", "speedup")),
                f"{row['evaluations']:.1f}",
                *(f"{row[key]:.2f}" for key in ("draft_ms", "verify_ms")),
                _identical(row),
            ]
            for row in rows
            if row["sweep"] == sweep
        ],
    )


def figure(rows: Sequence[Row], nodes: int) -> str:
    """Tokens per step and speedup against what a sweep varies, one column a sweep and one line a file."""
    files = list(dict.fromkeys(row["prompts"] for row in rows))
    styles = looks(files)
    panels = [(sweep, key) for sweep in AXES for key in ("beta", "speedup")]
    titles = {"beta": "tokens per step", "speedup": "speedup"}

    def fill(axes: Sequence["Axes"]) -> None:
        for axis, (sweep, key) in zip(axes, panels, strict=True):
            field, label = AXES[sweep]
            for name in files:
                for stream_pass, dash in DASHES.items():
                    own = [row for row in rows if _of(row) == (sweep, name, stream_pass)]
                    # Without pruning all drafts are kept.
                    places = [nodes if row[field] is None else row[field] for row in own]
                    points = sorted(zip(places, (row[key] for row in own), strict=True))
                    if points:
                        axis.plot(*zip(*points, strict=True), **styles[name] | {"linestyle": dash})
            axis.set(xlabel=label, ylim=(0, None))

    return draw([titles[key] for _, key in panels], fill, styles)


def _of(row: Row) -> tuple[str, str, str]:
    return row["sweep"], row["prompts"], row["stream_pass"]


def _identical(row: Row) -> str:
    wrong = row["mismatches"] + row["ties"]
    text = f"{row['num_prompts'] - wrong}/{row['num_prompts']}"
    return f"{text}, {row['ties']} at a tie" if row["ties"] else text
