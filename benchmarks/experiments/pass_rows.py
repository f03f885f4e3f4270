"""Times the pass of target models that verifies, by its rows: how much a draft node costs.

    python -m benchmarks.experiments.pass_rows --bundles build/chat/bundle engines/ --rows 1,2,5,9,17 \\
        --out build/pass_rows
    python -m benchmarks.experiments.pass_rows --bundles build/chat/bundle --rows 1,9 --operators \\
        --out build/pass_operators

A pass verifies a chain of random tokens after a text of random keys and values. The bundles and the numbers
of rows take turns. Writes pass_rows.json and the table of medians in milliseconds, and prints the table.

With --operators ONNX Runtime's own profiler counts and times the operators of these passes instead. Products
with weights are told from those of attention. The profiler adds 2 to 4 microseconds to every operator. Writes
pass_operators.json and the table, and prints the table.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import trange

from benchmarks.arguments import Parser, numbers
from benchmarks.report import markdown_table, write_report
from runtime.core.bundle import Bundle, GraphSpec, ModelSpec
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.token_tree import TokenTree
from runtime.decode.target_model import TargetModel
from runtime.engines.kv_cache import SlabKVCache
from runtime.engines.ort import Buffers, OrtForwardPass, graph_file, has_compiled_form, open_session
from runtime.engines.recorder import NullRecorder
from runtime.load.host import load_target_model

# Passes of a kind that are not timed.
WARM_UP = 3
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")

# The operators of one kind in a pass: their number, and their time in milliseconds.
Operators = dict[str, tuple[int, float]]


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.pass_rows", __doc__)
    parser.add("--bundles", type=Path, nargs="+", required=True, help="engine bundles of ONNX Runtime")
    text = "rows of a pass, with commas"
    parser.add("--rows", type=numbers(at_least(1)), default="1,2,5,9,17", help=text)
    parser.add("--length", type=at_least(1), default=200, help="positions of the text")
    parser.add("--repeats", type=at_least(1), default=20, help="timed passes of a kind")
    parser.add("--operators", action="store_true", help="count and time the operators of the passes")
    parser.add("--threads")
    parser.add("--out", help="directory of the report and the table")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Time the passes or their operators, write and print the table."""
    bundles = {path: Bundle.load(path) for path in args.bundles}
    rows = max(args.rows)
    for bundle in bundles.values():
        longest = bundle.manifest.model.max_position_embeddings
        if args.length + rows > longest:
            problem = f"with {rows} rows must be at most {longest - rows}, got {args.length}"
            raise UserError(f"--length: {problem}")
    name, report, table = (operators_of if args.operators else times_of)(args, bundles)
    report["settings"] = {"length": args.length, "repeats": args.repeats}
    write_report(args, f"{name}.json", report, texts={f"{name}.md": table + "\n"})
    print(table)
    return 0


def times_of(args: argparse.Namespace, bundles: dict[Path, Bundle]) -> tuple[str, dict[str, Any], str]:
    """Time the passes in turns. Returns the name of the report, the report and the table."""
    models = {
        path: _load(bundle, args.length, max(args.rows), args.threads) for path, bundle in bundles.items()
    }
    times: dict[tuple[Path, int], list[float]] = {}
    random = np.random.default_rng(0)
    for turn in trange(WARM_UP + args.repeats, desc="rounds"):
        for count in args.rows:
            for path, model in models.items():
                chain = TokenTree.chain(random.integers(0, bundles[path].manifest.model.vocab_size, count))
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
        ("bundle", *(f"{count} rows" for count in args.rows)),
        ([str(path), *(f"{medians[path, count]:.1f}" for count in args.rows)] for path in models),
    )
    return "pass_rows", {"rows": found}, table


def _load(bundle: Bundle, length: int, rows: int, threads: int | None) -> TargetModel:
    """A target model after a text of random keys and values."""
    model = load_target_model(bundle, max_nodes=rows, max_length=length + rows, num_threads=threads)
    model.engine.kv.reserve(length + rows, 1)
    model.engine.kv.randomize(1, length)
    return model


def operators_of(args: argparse.Namespace, bundles: dict[Path, Bundle]) -> tuple[str, dict[str, Any], str]:
    """Profile the passes. Returns the name of the report, the report and the table."""
    found = {
        (path, rows): _profile(bundle, rows, args.length, args.repeats, args.threads)
        for path, bundle in bundles.items()
        for rows in args.rows
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
    passes = [{"bundle": str(path), "rows": rows, "operators": each} for (path, rows), each in found.items()]
    return "pass_operators", {"passes": passes}, table


def _cell(operators: tuple[int, float] | None) -> str:
    return "" if operators is None else f"{operators[0]}, {operators[1]:.2f}"


def _total(operators: Operators) -> str:
    counts, times = zip(*operators.values(), strict=True)
    return _cell((sum(counts), sum(times)))


def _profile(bundle: Bundle, rows: int, length: int, repeats: int, threads: int | None) -> Operators:
    """The operators of a pass of so many rows by kind.

    A time is the sum of each operator's lower quartile, because other programs on the machine only add to it.
    """
    model, int8_products = bundle.manifest.model, bundle.manifest.int8_products
    # A pass holds addresses of the cache and the buffers, and does not keep them alive.
    kv, buffers = _random_text(model, length, rows), Buffers()
    # As ``load_target_model`` chooses.
    compiled = bundle.manifest.row_invariant and has_compiled_form(bundle, "backbone")
    path = graph_file(bundle, "backbone", int8_products=int8_products, compiled=compiled)
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory) / "profile"
        session = open_session(path, threads, int8_products=int8_products, compiled=compiled, profile=profile)
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
