"""Heads of speculative streams swept: how many upper layers, how many streams, how much pruning.

    python -m benchmarks.streams --heads HEAD ... --prompts gsm8k.jsonl --out build/streams/sweep

Decodes every prompt with plain decoding, with every head, and with the last head cut to its first streams
(``--gammas``), each with its streams in the verify pass and in a pass of their own, and with the last head
pruned (``--kept``), in turn. The cost is counted in evaluations of layers. Writes streams.md, streams.json
and streams.svg to OUT.

Exits with 1 when an output differs from plain decoding and the two tokens are no tie, with 2 when the input
cannot be used, with 130 for Ctrl-C.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.arguments import Parser, read_prompt_files
from benchmarks.methods.heads import Head, ensure_bundle, find_heads, model_digests
from benchmarks.report import draw, looks, markdown_table, require_matplotlib, write_report
from drafters.config import WEIGHTS_NAME, DrafterConfig
from export.options import OWN_PASS, STREAM_PASSES, VERIFY_PASS, Options
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.prompts import Prompt
from runtime.decode.budget import FixedBudget
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.profiler.arguments import node_counts
from runtime.profiler.environment import machine
from runtime.profiler.measure import Setting, compare_outputs, measure_runs
from runtime.profiler.report import acceptance_length, ms_per_token
from runtime.profiler.runs import PLAIN, Difference, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODEL = Path("demo/backbone")
LAYERS, STREAMS, PRUNING = "layers", "streams", "pruning"
EMBEDDINGS = "stream_embeddings"


@dataclass(frozen=True)
class Point:
    """One way to decode with streams.

    head: label of the head; sweep: what this point is there to show, one of the constants above
    base_layers: layers of the target model, N; num_layers: of those that streams pass, N_s
    num_frames: streams of a node, gamma
    kept_nodes: drafts of a tree that go on to the upper layers; None without pruning
    stream_pass: one of ``STREAM_PASSES``
    """

    sweep: str
    head: str
    base_layers: int
    num_layers: int
    num_frames: int
    kept_nodes: int | None
    stream_pass: str = VERIFY_PASS

    def layer_evaluations(self, num_nodes: int) -> int:
        """How many rows pass a layer in a step that verifies this many nodes, the root among them.

        All nodes pass the lower layers. Of the kept ones, the upper layers see the node and its streams.
        Example: N = 6, N_s = 2, gamma = 4 and 9 nodes; the root and 3 drafts are kept: 9 * 4 + 4 * 2 * 5.
        In a pass of their own there are the streams of a single node, 9 * 6 + 2 * 4, and besides every token
        that is accepted passes the upper layers again, which ``repeated_evaluations`` counts.
        """
        if self.stream_pass == OWN_PASS:
            return num_nodes * self.base_layers + self.num_layers * self.num_frames
        kept = num_nodes if self.kept_nodes is None else min(self.kept_nodes + 1, num_nodes)
        lower = num_nodes * (self.base_layers - self.num_layers)
        return lower + kept * self.num_layers * (1 + self.num_frames)

    @property
    def repeated_evaluations(self) -> int:
        """How many layers every accepted token passes a second time."""
        return self.num_layers if self.stream_pass == OWN_PASS else 0

    @property
    def bundle(self) -> tuple[str, int, str]:
        """The key of the point's bundle: head, number of streams, pass."""
        return self.head, self.num_frames, self.stream_pass

    @property
    def name(self) -> str:
        kept = "all" if self.kept_nodes is None else str(self.kept_nodes)
        where = f"{self.stream_pass} pass"
        return f"{self.sweep}: {self.head}, {self.num_frames} streams, {kept} drafts kept, {where}"


def make_points(configs: dict[str, DrafterConfig], gammas: Sequence[int], kept: Sequence[int]) -> list[Point]:
    """Every head as it is and the last one with fewer streams, in both passes; then the last with pruning.

    Raises UserError for a last head that cannot have so many streams.
    """
    points = [_point(LAYERS, label, config) for label, config in configs.items()]
    label, config = next(reversed(configs.items()))
    if gammas[-1] > config.num_frames:
        raise UserError(f"--gammas: {label} has {config.num_frames} streams, got {gammas[-1]}")
    if config.stream_identity != "embedding":
        raise UserError(f"--gammas: the angles of {label} depend on how many streams there are")
    for gamma in gammas:
        points.append(replace(_point(STREAMS, label, config), num_frames=gamma))
    points = [replace(point, stream_pass=each) for each in STREAM_PASSES for point in points]
    for count in (None, *reversed(kept)):
        points.append(replace(_point(PRUNING, label, config), kept_nodes=count))
    return points


def _point(sweep: str, label: str, config: DrafterConfig) -> Point:
    return Point(sweep, label, config.base_num_layers, config.num_layers, config.num_frames, None)


def read_configs(heads: Sequence[Head]) -> dict[str, DrafterConfig]:
    """Raises UserError for a head without streams, and for one that fine-tunes the target model."""
    for head in heads:
        if not head.stream_pass:
            raise UserError(f"--heads: {head.label} is a {head.drafter_type} head; expected one with streams")
        if head.stream_pass == OWN_PASS:
            raise UserError(f"--heads: {head.label} names a pass, and both are measured; name the head alone")
        if head.search != "prefix":
            raise UserError(f"--heads: {head.label} needs the search {head.search!r}; expected prefix")
        if head.fine_tunes:
            raise UserError(
                f"--heads: {head.label} fine-tunes the target model; benchmarks.methods compares such heads"
            )
    return {head.label: DrafterConfig.load(head.directory) for head in heads}


def build_bundles(
    heads: Sequence[Head], points: Sequence[Point], model_dir: Path, out: Path
) -> Iterator[tuple[tuple[str, int, str], Path]]:
    """The bundles of the points, by what they are built of."""
    model = model_digests(model_dir)
    by_label = {head.label: head for head in heads}
    for label, gamma, stream_pass in dict.fromkeys(point.bundle for point in points):
        head = by_label[label]
        if gamma != DrafterConfig.load(head.directory).num_frames:
            shortened = shorten(head.directory, gamma, out / "heads" / f"{label}-gamma{gamma}")
            (head,) = find_heads([str(shortened)], model_dir)
        head, options = replace(head, stream_pass=stream_pass), Options(stream_pass=stream_pass)
        yield (label, gamma, stream_pass), ensure_bundle(head, model_dir, model, out / "bundles", options)


def shorten(directory: Path, num_frames: int, out: Path) -> Path:
    """Write a head with its first streams alone. They are what they were: no stream sees a later one."""
    # Imported here because torch takes seconds.
    from drafters.base import load_weights
    from drafters.build import build_drafter

    config = DrafterConfig.load(directory)
    weights = load_weights(directory / WEIGHTS_NAME)
    weights[EMBEDDINGS] = weights[EMBEDDINGS][:num_frames]
    head = build_drafter(replace(config, num_frames=num_frames))
    head.load_state_dict(weights)
    head.save_pretrained(out)
    return out


def measure(
    points: Sequence[Point],
    bundles: Mapping[tuple[str, int, str], Path],
    prompts: Mapping[str, Sequence[Prompt]],
    *,
    num_nodes: int,
    max_new_tokens: int,
    num_threads: int | None,
) -> list[dict[str, Any]]:
    """One row for every prompt file and point, with trees of ``num_nodes`` drafts.

    bundles: by ``Point.bundle``; prompts: by file
    """
    with contextlib.ExitStack() as opened:

        def load(path: Path, **options: Any) -> SpeculativeDecoder:
            return opened.enter_context(
                contextlib.closing(
                    SpeculativeDecoder.from_bundle(path, num_threads=num_threads, verify=False, **options)
                )
            )

        first = bundles[points[0].bundle]
        plain = load(first, method="plain")
        # A way that belongs to several sweeps is run for each; the difference shows the noise.
        settings = [Setting(PLAIN, plain)] + [
            Setting(
                point.name,
                load(bundles[point.bundle], kept_nodes=point.kept_nodes),
                FixedBudget(num_nodes),
            )
            for point in points
        ]
        rows = []
        for name, texts in prompts.items():
            encoded = encode_prompts(plain, texts, max_new_tokens=max_new_tokens, where=f"--prompts: {name},")
            runs = measure_runs(settings, encoded, max_new_tokens=max_new_tokens, warmup=1)
            found = compare_outputs(Bundle.load(first, verify=False), encoded, runs, num_threads=num_threads)
            rows += [measured_row(name, point, runs, found) for point in points]
        return rows


def measured_row(
    prompts: str, point: Point, runs: Sequence[Run], differences: Sequence[Difference]
) -> dict[str, Any]:
    """The results of a point on a prompt file.

    beta: tokens per verify step; speedup: over plain decoding
    evaluations: rows that pass a layer, for every token
    draft_ms, verify_ms: the passes that draft and verify, medians; there is one where streams have no pass
        of their own
    ties, mismatches: outputs that are not plain's
    """
    own = [run for run in runs if run.setting == point.name]
    plain = [run for run in runs if run.setting == PLAIN]
    steps = [step for run in own for step in run.steps]
    wrong = [difference for difference in differences if difference.setting == point.name]
    tokens = sum(run.num_decoded for run in own)
    if not tokens:
        raise UserError(f"{prompts}: every output ends with its first token, so no step can be timed")
    evaluations = sum(point.layer_evaluations(step.num_nodes) for step in steps) / tokens
    return {
        "prompts": prompts,
        **asdict(point),
        "beta": acceptance_length(own),
        "speedup": ms_per_token(plain) / ms_per_token(own),
        "evaluations": evaluations + point.repeated_evaluations,
        **{f"{stage}_ms": median(step.stage_ms(stage) for step in steps) for stage in ("draft", "verify")},
        "num_prompts": len(own),
        "ties": sum(difference.is_tie for difference in wrong),
        "mismatches": sum(not difference.is_tie for difference in wrong),
    }


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
    here = report["machine"]
    parts = [
        "# Speculative streams, swept",
        f"```\n{report['command']}\n```",
        f"{here['cpu']}, {here['threads']} threads; greedy, trees of {report['nodes']} drafts.",
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
                    wanted = {"sweep": sweep, "prompts": name, "stream_pass": stream_pass}
                    own = [row for row in rows if wanted.items() <= row.items()]
                    # Without pruning all drafts are kept.
                    places = [nodes if row[field] is None else row[field] for row in own]
                    points = sorted(zip(places, (row[key] for row in own), strict=True))
                    if points:
                        axis.plot(*zip(*points, strict=True), **styles[name] | {"linestyle": dash})
            axis.set(xlabel=label, ylim=(0, None))

    return draw([titles[key] for _, key in panels], fill, styles)


def _identical(row: Row) -> str:
    wrong = row["mismatches"] + row["ties"]
    text = f"{row['num_prompts'] - wrong}/{row['num_prompts']}"
    return f"{text}, {row['ties']} at a tie" if row["ties"] else text


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.streams", __doc__)
    parser.add("--model", type=Path, default=MODEL, help="Hugging Face model directory")
    parser.add("--heads", nargs="+", required=True, metavar="DIR", help="heads of streams, lossless ones")
    parser.add("--prompts", "--max-prompts", "--max-new-tokens", "--threads")
    parser.add("--nodes", type=at_least(1), default=8, help="drafts of a tree")
    parser.add("--gammas", type=node_counts, default="1,2,3,4", help="streams to cut the last head to")
    parser.add("--kept", type=node_counts, default="1,2,4,6", help="drafts that pruning keeps, last head")
    parser.add("--out", help="directory of the tables, the figure and the bundles")
    return parser.run(sweep, argv)


def sweep(args: argparse.Namespace) -> int:
    """Build what is missing, measure, write and print the tables; 1 for a mismatch that is no tie."""
    require_matplotlib()
    prompts = read_prompt_files(args.prompts, args.max_prompts)
    heads = find_heads(args.heads, args.model)
    points = make_points(read_configs(heads), args.gammas, args.kept)
    rows = measure(
        points,
        dict(build_bundles(heads, points, args.model, args.out)),
        prompts,
        num_nodes=args.nodes,
        max_new_tokens=args.max_new_tokens,
        num_threads=args.threads,
    )
    report = {"command": args.command, "nodes": args.nodes, "rows": rows}
    texts = {
        "streams.md": markdown(report | {"machine": machine(args.threads)}),
        "streams.svg": figure(rows, args.nodes),
    }
    paths = write_report(args, "streams.json", report, texts=texts)
    for name, title in TITLES.items():
        print(f"{title}\n{table(rows, name)}\n")
    print("wrote " + ", ".join(str(path) for path in paths))
    wrong = [row for row in rows if row["mismatches"]]
    for row in wrong:
        print(f"NOT LOSSLESS: {row['head']}, {row['prompts']}: {row['mismatches']} outputs", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
