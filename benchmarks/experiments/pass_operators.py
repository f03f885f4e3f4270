"""Counts and times the operators of the pass that verifies, with ONNX Runtime's own profiler.

    python -m benchmarks.experiments.pass_operators --bundles build/chat/bundle engines/ --rows 1,9 \\
        --out build/pass_operators

A pass verifies a chain of random tokens after a text of random keys and values. Products with weights are
told from those of attention. The profiler adds 2 to 4 microseconds to every
operator. Writes pass_operators.json and the table, and prints the table.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import Parser
from benchmarks.experiments.pass_rows import WARM_UP, row_counts
from benchmarks.report import markdown_table, write_report
from runtime.core.bundle import Bundle, GraphSpec, ModelSpec
from runtime.core.cli import at_least
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.ort import Buffers, OrtForwardPass, graph_file, open_session

PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")

# The operators of one kind in a pass: their number, and their time in milliseconds.
Operators = dict[str, tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.experiments.pass_operators", __doc__)
    parser.add("--bundles", type=Path, nargs="+", required=True, help="engine bundles of ONNX Runtime")
    parser.add("--rows", default="1,5,9,17", help="rows of a pass, with commas (default 1,5,9,17)")
    parser.add("--length", type=at_least(1), default=200, help="positions of the text (default 200)")
    parser.add("--repeats", type=at_least(1), default=20, help="profiled passes of a kind (default 20)")
    parser.add("--threads")
    parser.add("--out", help="directory of pass_operators.json and pass_operators.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Profile the passes, write and print the table."""
    counts = row_counts(args.rows)
    found = {
        (path, rows): _profile(Bundle.load(path), rows, args.length, args.repeats, args.threads)
        for path in args.bundles
        for rows in counts
    }
    kinds = {kind: None for each in found.values() for kind in each}
    order = sorted(kinds, key=lambda kind: -max(each.get(kind, (0, 0.0))[1] for each in found.values()))
    totals = [_total(each) for each in found.values()]
    table = markdown_table(
        ("operator", *(f"{path}, {rows} rows: number, ms" for path, rows in found)),
        [
            ("all", *totals),
            *((kind, *(_cell(each.get(kind)) for each in found.values())) for kind in order),
        ],
    )
    report = {
        "passes": [
            {"bundle": str(path), "rows": rows, "operators": each} for (path, rows), each in found.items()
        ],
        "settings": {"length": args.length, "repeats": args.repeats},
    }
    write_report(args, "pass_operators.json", report, texts={"pass_operators.md": table + "\n"})
    print(table)
    return 0


def _cell(operators: tuple[int, float] | None) -> str:
    return "" if operators is None else f"{operators[0]}, {operators[1]:.2f}"


def _total(operators: Operators) -> str:
    numbers, times = zip(*operators.values(), strict=True)
    return _cell((sum(numbers), sum(times)))


def _profile(bundle: Bundle, rows: int, length: int, repeats: int, threads: int | None) -> Operators:
    """The operators of a pass of so many rows by kind.

    A time is the sum of each operator's lower quartile, because other programs on the machine only add to it.
    """
    model, int8_products = bundle.manifest.model, bundle.manifest.int8_products
    # A pass holds addresses of the cache and the buffers, and does not keep them alive.
    kv, buffers = _random_text(model, length, rows), Buffers()
    path = graph_file(bundle, "backbone", int8_products=int8_products)
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "profile"
        session = open_session(path, threads, int8_products=int8_products, profile=profile)
        spec = bundle.manifest.graphs["backbone"]
        forward = _forward_pass(session, spec, kv, buffers, rows, length, model.vocab_size)
        for _ in range(WARM_UP + repeats):
            forward.run()
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    times: dict[str, list[float]] = defaultdict(list)
    kinds = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"]].append(event["dur"] / 1000)
            kinds[event["name"]] = _kind(event["args"])
    operators: Operators = {}
    for name, each in times.items():
        number, total = operators.get(kinds[name], (0, 0.0))
        operators[kinds[name]] = (number + 1, total + float(np.percentile(each[WARM_UP:], 25)))
    return operators


def _random_text(model: ModelSpec, length: int, rows: int) -> SlabKVCache:
    """A cache that holds a text of random keys and values, and has room for the rows."""
    kv = SlabKVCache(
        num_layers=model.num_layers,
        num_slots=1,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        max_capacity=model.max_position_embeddings,
    )
    kv.reserve(length + rows, 1)
    kv.randomize(1, length)
    return kv


def _kind(event: dict[str, Any]) -> str:
    """The operator's name; products of attention have a batch, heads, rows and columns."""
    shapes = [next(iter(shape.values())) for shape in event["input_type_shape"]]
    is_attention = event["op_name"] in PRODUCTS and shapes and len(shapes[0]) == 4
    return f"{event['op_name']} of attention" if is_attention else str(event["op_name"])


def _forward_pass(
    session: Any, spec: GraphSpec, kv: SlabKVCache, buffers: Buffers, rows: int, length: int, vocab_size: int
) -> OrtForwardPass:
    """A chain of random tokens after the text in the cache."""
    axes = {"B": 1, "N": rows, "M": rows}
    outputs = frozenset({"next_tokens", "features"})
    forward = OrtForwardPass(session, spec, kv, buffers, axes, 0, outputs)
    inputs = forward.inputs
    inputs["input_ids"][0] = np.random.default_rng(0).integers(0, vocab_size, rows)
    inputs["position_ids"][0] = np.arange(length, length + rows)
    inputs["write_index"][0] = length
    inputs["logit_indices"][0] = np.arange(rows)
    forward.mask_causal([length])
    return forward


if __name__ == "__main__":
    raise SystemExit(main())
