"""Heads of speculative streams swept: how many upper layers, how many streams, how much pruning.

    python -m benchmarks.streams --heads HEAD ... --prompts gsm8k.jsonl --out build/streams/sweep

Decodes every prompt with plain decoding, with every head, and with the last head cut to its first streams
(``--gammas``), each with its streams in the verify pass and in a pass of their own, and with the last head
pruned (``--kept``), in turn. Writes streams.md, streams.json and streams.svg to OUT.

Exits with 1 when an output differs from plain decoding and the two tokens are no tie, with 2 when the input
cannot be used, with 130 for Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.arguments import Parser, read_prompt_files
from benchmarks.methods.heads import find_heads
from benchmarks.report import require_matplotlib, write_report
from benchmarks.streams.sweep import (
    TITLES,
    build_bundles,
    figure,
    make_points,
    markdown,
    measure,
    read_configs,
    table,
)
from runtime.core.cli import at_least
from runtime.profiler.arguments import node_counts
from runtime.profiler.environment import machine

MODEL = Path("demo/backbone")


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
