"""Times the pass of target models that verifies, by its rows: how much a draft node costs.

    python -m benchmarks.experiments.pass_rows --bundles build/chat/bundle engines/ --rows 1,2,5,9,17 \\
        --out build/pass_rows

A pass verifies a chain of random tokens after a text of random keys and values. The bundles and the numbers
of rows take turns. Writes pass_rows.json and the table of medians in milliseconds, and prints the table.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from tqdm import trange

from benchmarks.arguments import Parser
from benchmarks.report import markdown_table, write_report
from runtime.core.bundle import Bundle
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decode.target_model import TargetModel
from runtime.engines.recorder import NullRecorder
from runtime.load.host import load_target_model

# Rounds that are not timed.
WARM_UP = 3


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.pass_rows", __doc__)
    parser.add("--bundles", type=Path, nargs="+", required=True, help="engine bundles of ONNX Runtime")
    parser.add("--rows", default="1,2,5,9,17", help="rows of a pass, with commas (default 1,2,5,9,17)")
    parser.add("--length", type=at_least(1), default=200, help="positions of the text (default 200)")
    parser.add("--repeats", type=at_least(1), default=20, help="timed passes of a kind (default 20)")
    parser.add("--threads")
    parser.add("--out", help="directory of pass_rows.json and pass_rows.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Time the passes in turns, write and print the table."""
    rows = row_counts(args.rows)
    models = {path: _load(path, args.length, max(rows), args.threads) for path in args.bundles}
    times: dict[tuple[Path, int], list[float]] = {}
    random = np.random.default_rng(0)
    for turn in trange(WARM_UP + args.repeats, desc="rounds"):
        for count in rows:
            for path, (model, vocab_size) in models.items():
                chain = TokenTree.chain(random.integers(0, vocab_size, count))
                began = time.perf_counter()
                model.verify([chain], [args.length], logits=False, recorder=NullRecorder())
                if turn >= WARM_UP:
                    times.setdefault((path, count), []).append(1000 * (time.perf_counter() - began))
    medians = {key: statistics.median(each) for key, each in times.items()}
    found = [
        {"bundle": str(path), "rows": count, "median_ms": medians[path, count], "ms": each}
        for (path, count), each in times.items()
    ]
    table = markdown_table(
        ("bundle", *(f"{count} rows" for count in rows)),
        ([str(path), *(f"{medians[path, count]:.1f}" for count in rows)] for path in models),
    )
    report = {"rows": found, "settings": {"length": args.length, "repeats": args.repeats}}
    write_report(args, "pass_rows.json", report, texts={"pass_rows.md": table + "\n"})
    print(table)
    return 0


def row_counts(text: str) -> list[int]:
    """The numbers of an argument such as "1,5,9". Raises UserError."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise UserError(f"--rows: must be whole numbers of at least 1 with commas between, got {text!r}")
    return rows


def _load(path: Path, length: int, rows: int, threads: int | None) -> tuple[TargetModel, int]:
    """A target model after a text of random keys and values, and the size of its vocabulary."""
    bundle = Bundle.load(path)
    longest = bundle.manifest.model.max_position_embeddings
    if length + rows > longest:
        raise UserError(f"--length: with {rows} rows must be at most {longest - rows}, got {length}")
    model = load_target_model(bundle, max_nodes=rows, max_length=length + rows, num_threads=threads)
    model.engine.kv.reserve(length + rows, 1)
    model.engine.kv.randomize(1, length)
    return model, bundle.manifest.model.vocab_size


if __name__ == "__main__":
    raise SystemExit(main())
