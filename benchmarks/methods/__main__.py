"""Draft heads side by side: tokens per step, speedup, times and identical outputs, on any prompts.

    python -m benchmarks.methods --prompts gsm8k.jsonl mt_bench.jsonl --out build/methods
    python -m benchmarks.methods --heads demo/heads/ctc demo/heads/ctc:paper --prompts a.jsonl --out build/x

Builds the engine bundles that are missing, decodes every prompt greedily with plain decoding and every
head and tree size in turn, and writes to OUT:

    methods.md                     tables
    methods.json                   "rows", one a head, prompt file and tree size: method, prompts, nodes,
                                   beta, gamma, draft_ms (until the tree is ready), verify_ms, params,
                                   lossless (identical / prompts); beside them "methods" (seeds
                                   together), "ratios" (of the first method's beta), "details",
                                   categories, curves, machine
    beta_nodes.svg, beta_draft.svg, curves.svg
    runs.jsonl                     what was measured, prompt by prompt

A method is called after its head's directory; directories NAME-seed1, NAME-seed2, ... are seeds of the
method NAME. A head is decoded with its natural transform (``natural_transform``) unless ``DIR:TRANSFORM``
names another, which then shows in its label. Stopped with Ctrl-C or otherwise, the same command
continues; a speedup is a ratio within one prompt, so it does not matter when the prompt was run. Only
what was given is compared when continuing, not the project's own code: start anew after changing it.

Exits with 1 when an output differs from plain decoding and the two tokens are no tie, with 2 when the
input cannot be used, with 130 for Ctrl-C.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.arguments import Parser, check_out, node_counts, read_prompt_files, require_matplotlib
from benchmarks.methods.heads import HEAD_FILES, Head, ensure_bundle, find_heads, model_digests
from benchmarks.methods.measure import Comparison
from benchmarks.methods.report import main_table, markdown
from benchmarks.methods.runs import RUNS_NAME, Journal, Record, Unit, prompt_digest
from benchmarks.methods.table import aggregate, by_category, collect, detail, plain_row, ratios, row
from export.options import DRAFTER_PRECISIONS, Options
from runtime.cli import at_least, exit_status
from runtime.errors import UserError
from runtime.profiler.environment import machine, versions
from runtime.profiler.files import write_files
from runtime.profiler.report import TIE_TOLERANCE
from runtime.text.prompts import Prompt

MODEL = Path("demo/backbone")
HEADS = Path("demo/heads")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", "benchmarks.methods", *argv])
    return exit_status(
        "methods", lambda: compare(parse_args(argv), command), interrupted="the same command continues"
    )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.methods", __doc__)
    add = parser.add_argument
    add("--model", type=Path, default=MODEL, help="Hugging Face model directory (default %(default)s)")
    add("--heads", nargs="+", metavar="DIR[:TRANSFORM]", help=f"draft heads (default: all in {HEADS})")
    add("--prompts", type=Path, nargs="+", required=True, help="jsonl; turns, question, prompt or text")
    add("--nodes", type=node_counts, default=(8, 16, 32, 60), help="a comma list (default 8,16,32,60)")
    add("--max-new-tokens", type=at_least(2), default=128, help="tokens per prompt (default %(default)s)")
    add("--max-prompts", type=at_least(1), help="use the first prompts of every file only")
    add("--repeats", type=at_least(1), default=1, help="runs per prompt and setting (default %(default)s)")
    add("--drafter-precision", choices=DRAFTER_PRECISIONS, default="fp32", help="of the heads (default fp32)")
    add(
        "--min-level-probability",
        type=float,
        default=Options.min_level_probability,
        help="of hydra and eagle; 0: the best tree",
    )
    add("--threads", type=at_least(1), help="threads per engine (default: the available cores)")
    add("--bundles", type=Path, help="where built engine bundles are kept (default OUT/bundles)")
    add("--out", type=Path, required=True, help="directory of the tables and figures")
    return parser.parse_args(argv)


def compare(args: argparse.Namespace, command: str) -> int:
    """Build, measure, write, print; 1 for an output that is neither identical nor a tie."""
    require_matplotlib()
    check_out(args.out)
    prompts = read_prompt_files(args.prompts, args.max_prompts)
    heads = find_heads(args.heads or default_heads(), args.model)
    model = model_digests(args.model)
    settings = describe(args, heads, model)
    journal = Journal(args.out / RUNS_NAME, settings)
    units = [
        (Unit(name, index, repeat), prompt_digest(prompt))
        for name, rows in prompts.items()
        for repeat in range(args.repeats)
        for index, prompt in enumerate(rows)
    ]
    missing = [(unit, digest) for unit, digest in units if not journal.has(unit, digest)]
    if missing:
        measure(args, heads, model, prompts, journal, missing, len(units))
    records = journal.select([unit for unit, _ in units])
    report = build_report(args, heads, prompts, records)
    report = {**report, "settings": settings, "command": command, "tie_tolerance": TIE_TOLERANCE}
    report |= {"machine": machine(args.threads), "versions": versions()}
    paths = write_files(args.out, texts(report))
    print(main_table(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return check_lossless(report["details"])


def default_heads() -> list[str]:
    """Every draft head beside the demo's."""
    found = sorted(str(path.parent) for path in HEADS.glob("*/config.json"))
    if not found:
        raise UserError(f"--heads: there is no draft head in {HEADS}; name one")
    return found


def describe(args: argparse.Namespace, heads: Sequence[Head], model: Mapping[str, str]) -> dict[str, Any]:
    """What has to be the same for two runs to go into one table."""
    here = machine(args.threads)
    return {
        "model": dict(model),
        "heads": {head.label: {"transform": head.transform, **head.digests} for head in heads},
        "drafter_precision": args.drafter_precision,
        "min_level_probability": args.min_level_probability,
        "nodes": list(args.nodes),
        "max_new_tokens": args.max_new_tokens,
        "threads": here["threads"],
        "cpu": here["cpu"],
        "versions": versions(),
    }


def measure(
    args: argparse.Namespace,
    heads: Sequence[Head],
    model: Mapping[str, str],
    prompts: Mapping[str, Sequence[Prompt]],
    journal: Journal,
    missing: Sequence[tuple[Unit, str]],
    total: int,
) -> None:
    """Run the missing units and append them to the journal."""
    directory = args.bundles or args.out / "bundles"
    options = Options(
        drafter_precision=args.drafter_precision, min_level_probability=args.min_level_probability
    )
    bundles = {head.label: ensure_bundle(head, args.model, model, directory, options) for head in heads}
    comparison = Comparison(
        heads, bundles, nodes=args.nodes, max_new_tokens=args.max_new_tokens, num_threads=args.threads
    )
    encoded = {name: comparison.encode(name, rows) for name, rows in prompts.items()}
    first, _ = missing[0]
    comparison.warm_up(encoded[first.prompts][first.prompt])
    with tqdm(total=total, initial=total - len(missing), desc="methods", unit="prompt") as bar:
        for unit, digest in missing:
            journal.append(comparison.measure(unit, digest, encoded[unit.prompts][unit.prompt]))
            bar.update()


def build_report(
    args: argparse.Namespace,
    heads: Sequence[Head],
    prompts: Mapping[str, Sequence[Prompt]],
    records: Sequence[Record],
) -> dict[str, Any]:
    """The measured part of ``methods.json``."""
    methods = {head.label: head.method for head in heads}
    details, plain, categories = [], [], {}
    for name, path in zip(prompts, args.prompts, strict=True):
        own = [record for record in records if record.unit.prompts == name]
        samples = collect(own, name)
        plain.append(plain_row(name, samples[heads[0].label, args.nodes[0]].plain))
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
        # A head that is measured under several transforms was trained once.
        "curves": {head.directory.name: list(head.curve) for head in heads if head.curve},
        "heads": [
            {
                "method": head.label,
                "drafter_type": head.drafter_type,
                "transform": head.transform,
                "seed": head.seed,
                "params": head.params,
                **{name: head.digests[name] for name in HEAD_FILES},
            }
            for head in heads
        ],
    }


def texts(report: Mapping[str, Any]) -> dict[str, str]:
    """All files of OUT by name."""
    # matplotlib takes a second to import: not before there is something to draw.
    from benchmarks.methods.plots import beta_by_draft_time, beta_by_nodes, learning_curves

    files = {
        "methods.md": markdown(report),
        "methods.json": json.dumps(report, indent=1, allow_nan=False) + "\n",
        "beta_nodes.svg": beta_by_nodes(report["methods"]),
        "beta_draft.svg": beta_by_draft_time(report["methods"]),
    }
    if report["curves"]:
        files["curves.svg"] = learning_curves(report["curves"])
    return files


def read_categories(path: Path) -> list[str | None]:
    """The ``category`` of every prompt of a file that ``read_prompts`` accepts."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    found = [json.loads(line).get("category") for line in lines if line.strip()]
    return [category if isinstance(category, str) else None for category in found]


def check_lossless(details: Sequence[Mapping[str, Any]]) -> int:
    """Say which outputs are wrong, if any; the exit status."""
    wrong = [found for found in details if found["mismatches"]]
    for found in wrong:
        first = next(
            d for d in found["differences"] if d["logit_gap"] is None or d["logit_gap"] > TIE_TOLERANCE
        )
        print(
            f"NOT LOSSLESS: {found['method']}, {found['nodes']} nodes, {found['prompts']}: "
            f"{found['mismatches']} outputs differ from plain decoding; prompt {first['prompt'] + 1}: token "
            f"{first['position']} is {first['token']}, plain decoding has {first['plain_token']}",
            file=sys.stderr,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
