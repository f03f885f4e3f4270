"""Draft heads side by side: tokens per step, speedup, times and identical outputs, on any prompts.

    python -m benchmarks.methods --prompts gsm8k.jsonl mt_bench.jsonl --out build/methods
    python -m benchmarks.methods --heads demo/heads/ctc demo/heads/ctc:paper --prompts a.jsonl --out build/x

Builds the engine bundles that are missing, decodes every prompt greedily with plain decoding and every
head and tree size in turn, and writes to OUT:

    methods.md                     tables
    methods.json                   "rows", one a head, prompt file and tree size: method, prompts, nodes,
                                   beta (the acceptance length), gamma (the speedup), draft_ms (until the
                                   tree is ready), verify_ms, params, lossless (identical / prompts);
                                   beside them "methods" (seeds together), "ratios" (of the first method's
                                   beta), "details", categories, machine
    beta_nodes.svg, beta_draft.svg
    runs.jsonl                     what was measured, prompt by prompt

A method is called after its head's directory; directories NAME-seed1, NAME-seed2, ... are seeds of the
method NAME. A head is decoded with its natural transform (``natural_transform``) unless ``DIR:TRANSFORM``
names another, which then shows in its label; ``DIR:own`` gives streams a pass of their own. Stopped with
Ctrl-C or otherwise, the same command continues; a speedup is a ratio within one prompt, so it does not
matter when the prompt was run. Only what was given is compared when continuing, not the project's own code:
start anew after changing it.

Exits with 1 when an output differs from plain decoding and the two tokens are no tie, with 2 when the
input cannot be used, with 130 for Ctrl-C.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arguments import Parser, read_prompt_files
from benchmarks.figures import require_matplotlib
from benchmarks.methods.heads import Head, ensure_bundle, find_heads, model_digests
from benchmarks.methods.measure import Comparison
from benchmarks.methods.plots import acceptance_by_draft_time, acceptance_by_nodes
from benchmarks.methods.report import main_table, markdown
from benchmarks.methods.runs import RUNS_NAME, Journal, Record, Unit, prompt_digest
from benchmarks.methods.table import aggregate, by_category, collect, detail, plain_row, ratios, row
from export.onnxruntime_target import ONNXRUNTIME_PRECISIONS
from export.options import OWN_PASS, VERIFY_PASS, Options
from runtime.cli import at_least
from runtime.errors import UserError
from runtime.profiler.arguments import node_counts
from runtime.profiler.differences import TIE_TOLERANCE, is_tie
from runtime.profiler.environment import machine, versions
from runtime.profiler.files import write_files
from runtime.profiler.measure import encode_prompts
from runtime.text.prompts import Prompt

MODEL = Path("demo/backbone")
HEADS = Path("demo/heads")
# Fields of ``Head`` that go into the report, beside its files' digests.
HEAD_KEYS = ("drafter_type", "transform", "seed", "params")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.methods", __doc__)
    parser.add("--model", type=Path, default=MODEL, help="Hugging Face model directory")
    parser.add("--heads", nargs="+", metavar="DIR[:WAY]", help=f"draft heads (default: all in {HEADS})")
    parser.add("--prompts", "--max-prompts", "--max-new-tokens", "--repeats", "--threads")
    parser.add("--nodes", type=node_counts, default="8,16,32,60", help="draft nodes, a comma list")
    parser.add(
        "--drafter-precision", choices=tuple(ONNXRUNTIME_PRECISIONS), default="fp32", help="of the heads"
    )
    least = Options.min_level_probability
    parser.add(
        "--min-level-probability", type=float, default=least, help="of hydra and eagle; 0: the best tree"
    )
    parser.add(
        "--kept-nodes", type=at_least(1), help="drafts that streams in the verify pass keep (default: all)"
    )
    parser.add("--bundles", type=Path, help="where built engine bundles are kept (default OUT/bundles)")
    parser.add("--out", help="directory of the tables and figures")
    return parser.run(compare, argv, interrupted="interrupted; the same command continues")


def compare(args: argparse.Namespace) -> int:
    """Measure what is missing, write and print the report; 1 for a mismatch that is no tie."""
    require_matplotlib()
    prompts = read_prompt_files(args.prompts, args.max_prompts)
    heads = find_heads(args.heads or default_heads(), args.model)
    model = model_digests(args.model)
    settings = describe(args, heads, model)
    journal = Journal(args.out / RUNS_NAME, settings)
    digests = {
        Unit(name, index, repeat): prompt_digest(prompt)
        for name, rows in prompts.items()
        for repeat in range(args.repeats)
        for index, prompt in enumerate(rows)
    }
    missing = [unit for unit, digest in digests.items() if not journal.has(unit, digest)]
    if missing:
        comparison = load(args, heads, model)
        encoded = {
            name: encode_prompts(
                comparison.plain, rows, max_new_tokens=args.max_new_tokens, where=f"--prompts: {name},"
            )
            for name, rows in prompts.items()
        }
        comparison.warm_up(encoded[missing[0].prompts][missing[0].prompt])
        done = len(digests) - len(missing)
        for unit in tqdm(missing, total=len(digests), initial=done, desc="methods", unit="prompt"):
            journal.append(comparison.measure(unit, digests[unit], encoded[unit.prompts][unit.prompt]))
    report = build_report(args, heads, prompts, journal.select(list(digests)))
    report |= {"settings": settings, "command": args.command, "tie_tolerance": TIE_TOLERANCE}
    report |= {"machine": machine(args.threads), "versions": versions()}
    paths = write_files(args.out, texts(report))
    print(main_table(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return check_lossless(report["details"])


def default_heads() -> list[str]:
    """Return the directories of all draft heads of the demo."""
    found = sorted(str(path.parent) for path in HEADS.glob("*/config.json"))
    if not found:
        raise UserError(f"--heads: there is no draft head in {HEADS}; name one")
    return found


def describe(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that must be equal for two runs to go into one table."""
    here = machine(args.threads)
    return {
        "model": dict(model),
        "heads": {head.label: {"transform": head.transform, **head.digests} for head in heads},
        "drafter_precision": args.drafter_precision,
        "min_level_probability": args.min_level_probability,
        "kept_nodes": args.kept_nodes,
        "nodes": args.nodes,
        "max_new_tokens": args.max_new_tokens,
        "threads": here["threads"],
        "cpu": here["cpu"],
        "versions": versions(),
    }


def load(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> Comparison:
    """Build the bundles that are missing and load all decoders."""
    options = Options(
        drafter_precision=args.drafter_precision, min_level_probability=args.min_level_probability
    )
    # Streams run in the target model's layers, so the precision of the heads is not theirs.
    of_streams = {
        VERIFY_PASS: Options(kept_nodes=args.kept_nodes),
        OWN_PASS: Options(stream_pass=OWN_PASS),
    }
    directory = args.bundles or args.out / "bundles"
    bundles = {
        head.label: ensure_bundle(
            head, args.model, model, directory, of_streams.get(head.stream_pass or "", options)
        )
        for head in heads
    }
    return Comparison(
        heads, bundles, nodes=args.nodes, max_new_tokens=args.max_new_tokens, num_threads=args.threads
    )


def build_report(
    args: argparse.Namespace,
    heads: Sequence[Head],
    prompts: Mapping[str, Sequence[Prompt]],
    records: Sequence[Record],
) -> dict[str, Any]:
    """Return the measured part of ``methods.json``."""
    methods = {head.label: head.method for head in heads}
    details, plain, categories = [], [], {}
    for name, path in zip(prompts, args.prompts, strict=True):
        of_file = [record for record in records if record.unit.prompts == name]
        samples = collect(of_file, name)
        without_drafts = [o for record in of_file for o in record.outcomes if not o.nodes]
        for method in dict.fromkeys(o.method for o in without_drafts):
            plain.append(plain_row(name, [o for o in without_drafts if o.method == method]))
        details += [
            detail(head, count, name, samples[head.label, count]) for head in heads for count in args.nodes
        ]
        largest = {head.label: samples[head.label, args.nodes[-1]] for head in heads}
        found = by_category(largest, methods, read_categories(path))
        if found:
            categories[name] = found
    together = aggregate(details, methods)
    return {
        "rows": [row(found) for found in details],
        "methods": together,
        "ratios": ratios(together, heads[0].method),
        "plain": plain,
        "details": details,
        "categories": categories,
        "heads": [
            {"method": head.label, **{key: getattr(head, key) for key in HEAD_KEYS}, **head.digests}
            for head in heads
        ],
    }


def texts(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of all files of OUT by name."""
    return {
        "methods.md": markdown(report),
        "methods.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "beta_nodes.svg": acceptance_by_nodes(report["methods"]),
        "beta_draft.svg": acceptance_by_draft_time(report["methods"]),
    }


def read_categories(path: Path) -> list[str | None]:
    """Read the ``category`` of every prompt of a file that ``read_prompts`` accepts."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    found = [json.loads(line).get("category") for line in lines if line.strip()]
    return [category if isinstance(category, str) else None for category in found]


def check_lossless(details: Sequence[Mapping[str, Any]]) -> int:
    """Print which outputs are wrong, if any, and return the exit status."""
    wrong = [found for found in details if found["mismatches"]]
    for found in wrong:
        first = next(difference for difference in found["differences"] if not is_tie(difference["logit_gap"]))
        print(
            f"NOT LOSSLESS: {found['method']}, {found['nodes']} nodes, {found['prompts']}: "
            f"{found['mismatches']} outputs differ from plain decoding; prompt {first['prompt'] + 1}: token "
            f"{first['position']} is {first['token']}, plain decoding has {first['plain_token']}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
