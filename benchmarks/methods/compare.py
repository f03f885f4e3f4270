"""The work of ``python -m benchmarks.methods``: build, measure what is missing, write tables and figures."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.figures import require_matplotlib
from benchmarks.methods.heads import Head, ensure_bundle, find_heads, model_digests
from benchmarks.methods.measure import Comparison
from benchmarks.methods.plots import acceptance_by_draft_time, acceptance_by_nodes
from benchmarks.methods.report import main_table, markdown
from benchmarks.methods.runs import RUNS_NAME, Journal, Record, Unit, prompt_digest
from benchmarks.methods.table import aggregate, by_category, collect, detail, plain_row, ratios, row
from export.options import OWN_PASS, VERIFY_PASS, Options
from runtime.core.prompts import Prompt
from runtime.profiler.arguments import write_files
from runtime.profiler.environment import machine, versions
from runtime.profiler.measure import encode_prompts
from runtime.profiler.runs import TIE_TOLERANCE, is_tie

# Fields of ``Head`` that go into the report, beside its files' digests.
HEAD_KEYS = ("drafter_type", "search", "seed", "params")


def compare(args: argparse.Namespace, prompts: Mapping[str, Sequence[Prompt]]) -> int:
    """Measure what is missing, write and print the report; 1 for a mismatch that is no tie."""
    require_matplotlib()
    heads = find_heads(args.heads, args.model)
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


def describe(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that must be equal for two runs to go into one table."""
    here = machine(args.threads)
    return {
        "model": dict(model),
        "heads": {head.label: {"search": head.search, **head.digests} for head in heads},
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
