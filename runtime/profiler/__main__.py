"""Measure speculative decoding against plain decoding, on the same engine and the same prompts.

    python -m runtime.profiler --bundle engines/ --prompts prompts.jsonl --out report/
    python -m runtime.profiler --bundle engines/ --prompts prompts.jsonl --out report/ --repeats 3

Writes ``report.json``, ``report.html`` (opens without a network) and ``trace.json`` (for
https://ui.perfetto.dev) and prints the same numbers. Exits with 1 when an output differs from plain
decoding and the two tokens are no tie, with 2 when the input cannot be used.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from runtime.bundle import Bundle
from runtime.cli import at_least, exit_status
from runtime.decoder import AUTO, DEFAULT_NUM_NODES, MAX_NUM_NODES, SpeculativeDecoder
from runtime.errors import RequestError, UserError
from runtime.load import TRANSFORMS
from runtime.profiler.environment import describe_bundle, machine, versions
from runtime.profiler.files import write_files
from runtime.profiler.measure import measure_runs, time_verify
from runtime.profiler.report import TIE_TOLERANCE, build_report, format_table, is_tie
from runtime.profiler.report_html import render
from runtime.profiler.runs import Difference, find_differences
from runtime.profiler.ties import logit_gaps
from runtime.profiler.trace import build_trace
from runtime.text.prompts import read_prompts

TREE_SIZES = (1, 2, 4, 8, 16, 32)


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    command = shlex.join(["python", "-m", "runtime.profiler", *argv])
    return exit_status(
        "profiler", lambda: profile(args, command), interrupted="interrupted: no report was written"
    )


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runtime.profiler", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--bundle", type=Path, required=True, help="engine bundle, with a draft head")
    add("--prompts", type=Path, required=True, help="jsonl; rows with turns, question, prompt or text")
    add("--out", type=Path, required=True, help="directory for report.json, report.html and trace.json")
    add("--max-new-tokens", type=at_least(2), default=128, help="tokens per prompt (default %(default)s)")
    add(
        "--num-nodes",
        type=_sizes,
        default=[4, 8, 16],
        help="draft nodes, a comma list of numbers and auto",
    )
    add("--max-prompts", type=at_least(1), help="use the first prompts only")
    add("--repeats", type=at_least(1), default=1, help="runs per prompt and setting (default %(default)s)")
    add("--warmup", type=at_least(0), default=2, help="prompts decoded untimed first (default %(default)s)")
    add("--threads", type=at_least(1), help="threads per engine (default: the available cores)")
    add(
        "--transform",
        choices=tuple(TRANSFORMS),
        default="prefix",
        help="lattice to tree (default %(default)s)",
    )
    return parser.parse_args(argv)


def profile(args: argparse.Namespace, command: str) -> int:
    """Measure, write, print; 1 for an output that is neither identical nor a tie."""
    bundle = Bundle.load(args.bundle, verify=False)  # the decoders verify the files
    if bundle.manifest.drafter is None:
        raise UserError(
            f"{args.bundle}: the bundle has no draft head to profile; "
            "build it with export/build_engines.py --drafter"
        )
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {args.out}: cannot be made: {error.strerror}") from error
    options = {"num_threads": args.threads}
    vanilla = SpeculativeDecoder.from_bundle(args.bundle, method="vanilla", **options)
    speculative = SpeculativeDecoder.from_bundle(
        args.bundle,
        transform=args.transform,
        num_nodes=AUTO if AUTO in args.num_nodes else DEFAULT_NUM_NODES,
        **options,
    )
    prompts = load_prompts(args, vanilla)

    runs = measure_runs(
        vanilla,
        speculative,
        prompts,
        num_nodes=args.num_nodes,
        max_new_tokens=args.max_new_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
    )
    if not any(run.num_decoded for run in runs):
        raise UserError(f"{args.prompts}: every output ends with its first token, so no step can be timed")
    differences = find_differences(runs)
    gaps = logit_gaps(bundle, prompts, runs, differences, num_threads=args.threads)
    typical = sorted(prompts, key=len)[len(prompts) // 2]
    sizes = [size for size in TREE_SIZES if len(typical) + size <= speculative.max_length]
    verify_ms = time_verify(speculative.batch.backbone, typical, sizes)

    compared = list(zip(differences, gaps, strict=True))
    context = {
        "bundle": describe_bundle(bundle),
        "settings": {
            **{key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
            "num_prompts": len(prompts),
            "verify_prefix_length": len(typical),
            "tie_tolerance": TIE_TOLERANCE,
        },
        "command": command,
        "machine": machine(args.threads),
        "versions": versions(),
    }
    report = build_report(runs, compared, verify_ms=verify_ms, context=context)
    trace = build_trace(runs, num_nodes=report["speculative"]["num_nodes"])
    paths = write_files(
        args.out,
        {
            "report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
            "report.html": render(report),
            "trace.json": json.dumps(trace, separators=(",", ":")) + "\n",
        },
    )
    print(format_table(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return check_lossless(compared)


def load_prompts(args: argparse.Namespace, decoder: SpeculativeDecoder) -> list[list[int]]:
    """Tokenise every prompt and check that it can be served, before anything is measured."""
    prompts = []
    for number, row in enumerate(read_prompts(args.prompts)[: args.max_prompts], 1):
        try:
            token_ids = decoder.prompt_tokenizer.encode(row.text, raw=row.raw)
            # Checks its arguments when called; nothing runs until it is iterated.
            decoder.stream(token_ids, max_new_tokens=args.max_new_tokens)
        except RequestError as error:
            raise UserError(f"{args.prompts}: prompt {number}: {error}") from error
        prompts.append(token_ids)
    return prompts


def check_lossless(compared: Sequence[tuple[Difference, float | None]]) -> int:
    """Say which outputs are wrong, if any; the exit status."""
    wrong = [(difference, gap) for difference, gap in compared if not is_tie(gap)]
    for difference, gap in wrong[:5]:
        reason = "one output ends there" if gap is None else f"logit gap {gap:.2e}"
        print(
            f"NOT LOSSLESS: prompt {difference.prompt + 1}, {difference.setting} nodes: token "
            f"{difference.position} is {difference.speculative_token}, plain decoding has "
            f"{difference.vanilla_token} ({reason})",
            file=sys.stderr,
        )
    if wrong:
        print(f"error: {len(wrong)} outputs differ from plain decoding and are no ties", file=sys.stderr)
    return 1 if wrong else 0


def _sizes(text: str) -> list[int | str]:
    """``"8,4,auto,16"`` -> [4, 8, 16, "auto"], in order and without repeats."""
    parts = {part.strip() for part in text.split(",")}
    sizes = sorted(at_least(1)(part) for part in parts - {AUTO})
    if sizes and sizes[-1] > MAX_NUM_NODES:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_NUM_NODES} nodes, got {sizes[-1]}")
    return [*sizes, *([AUTO] if AUTO in parts else [])]


if __name__ == "__main__":
    sys.exit(main())
