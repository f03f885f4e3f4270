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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.bundle import PLAIN as PLAIN_METHOD
from runtime.core.cli import AUTO, Parser, at_least, exit_status
from runtime.core.errors import UserError
from runtime.core.options import DEFAULT_NUM_NODES, SHAPES, TREE, choose_method, current_method
from runtime.core.prompts import read_prompts
from runtime.core.system import git_sha
from runtime.profiler.arguments import add_arguments, check_out, node_counts_or_auto, write_files

if TYPE_CHECKING:
    from runtime.decoder import SpeculativeDecoder
    from runtime.profiler.runs import Difference

TREE_SIZES = (1, 2, 4, 8, 16, 32)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)

    command = shlex.join(["python", "-m", "runtime.profiler", *argv])
    interrupted = "interrupted: no report was written"
    return exit_status("profiler", lambda: profile(args, command), interrupted=interrupted)


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser("profiler", "runtime.profiler", __doc__)
    add = partial(add_arguments, parser)
    add("--bundle", help="engine bundle, with a draft head unless drafts come from the text alone")
    add("--prompts", nargs=None)
    add("--out", help="directory for report.json, report.html and trace.json")
    add("--max-new-tokens", "--max-prompts", "--repeats", "--threads", "--search")
    sizes = f"draft nodes, a comma list of numbers and, with drafts of a head, {AUTO}"
    add("--num-nodes", type=node_counts_or_auto, default=f"4,8,{AUTO}", help=sizes)
    add("--tree", choices=SHAPES, default=TREE, help="chain: verify the best path alone")
    text_of = "of the speculative runs (default: draft)"
    add("--method", type=current_method, choices=METHODS, help=text_of)
    add("--kept-nodes", type=at_least(1), help="of speculative streams, as in runtime.generate")
    text_of = "draft also what followed the last tokens earlier in the text, as in runtime.generate"
    add("--prompt-lookup", action="store_true", help=text_of)
    add("--step", choices=STEPS, help="what runs a step: the host, or graphs on a device")
    add("--device", help="of graph steps: cpu, or a GPU as cuda:0")
    add("--warmup", type=at_least(0), default=2, help="prompts decoded untimed first")
    return parser.parse_args(argv)


def profile(args: argparse.Namespace, command: str) -> int:
    """Measure, write and print the report; 1 for an output that is neither identical nor a tie."""
    bundle = Bundle.load(args.bundle, verify=False)  # the decoders verify the files
    if bundle.manifest.drafter is None and not args.prompt_lookup:
        raise UserError(
            f"{args.bundle}: the bundle has no draft head to profile; "
            "build it with export/build_engines.py --drafter, or profile --prompt-lookup"
        )
    args.method = choose_method(bundle.manifest, args.method, args.bundle, option="--method")
    texts = read_prompts(args.prompts)[: args.max_prompts]
    check_out(args.out)
    # These import numba and ONNX Runtime.
    from runtime.core.baselines import SEARCHES
    from runtime.decode.budget import FixedBudget
    from runtime.decode.step import HostStep
    from runtime.decoder import SpeculativeDecoder, encode_prompts
    from runtime.profiler.environment import describe_bundle, machine, versions
    from runtime.profiler.measure import Setting, compare_outputs, measure_runs, time_verify
    from runtime.profiler.report import build_report, build_trace, format_report
    from runtime.profiler.report_html import render
    from runtime.profiler.runs import PLAIN, TIE_TOLERANCE

    if args.method == PLAIN_METHOD and not args.prompt_lookup:
        raise UserError("--method: plain decoding is what the others are compared with, got plain alone")
    if args.method == PLAIN_METHOD:
        # Drafts of the text alone have a fixed number of nodes.
        args.num_nodes = [count for count in args.num_nodes if count != AUTO] or [DEFAULT_NUM_NODES]
    place: dict[str, Any] = {"num_threads": args.threads, "step": args.step, "device": args.device}
    plain = SpeculativeDecoder.from_bundle(args.bundle, method=PLAIN_METHOD, **place)
    speculative = SpeculativeDecoder.from_bundle(
        args.bundle,
        method=args.method,
        kept_nodes=args.kept_nodes,
        search=SEARCHES[args.search],
        tree=args.tree,
        prompt_lookup=args.prompt_lookup,
        num_nodes=None if AUTO in args.num_nodes else DEFAULT_NUM_NODES,
        **place,
    )
    args.num_nodes = _sizes_that_run(bundle, speculative, args.num_nodes)
    prompts = encode_prompts(plain, texts, max_new_tokens=args.max_new_tokens, where=f"{args.prompts}:")
    settings = [Setting(PLAIN, plain)]
    for count in args.num_nodes:
        settings.append(Setting(count, speculative, None if count == AUTO else FixedBudget(count)))
    limits = {"max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "warmup": args.warmup}
    runs = measure_runs(settings, prompts, **limits)
    if not any(run.num_decoded for run in runs):
        raise UserError(f"{args.prompts}: every output ends with its first token, so no step can be timed")
    differences = compare_outputs(bundle, prompts, runs, num_threads=args.threads)
    typical = sorted(prompts, key=len)[len(prompts) // 2]
    sizes = [size for size in TREE_SIZES if len(typical) + size <= speculative.max_length]
    verify_ms: dict[int, list[float]] = {}
    # On a device a pass of its own would not be what a step does; its time is the stage ``verify``.
    if isinstance(speculative.batch.runner, HostStep):
        verify_ms = time_verify(speculative.batch.runner.target_model, typical, sizes)
    context = {
        "bundle": describe_bundle(bundle),
        "settings": {
            **{key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()},
            "num_prompts": len(prompts),
            "verify_prefix_length": len(typical),
            "tie_tolerance": TIE_TOLERANCE,
        },
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_sha(),
        "machine": machine(args.threads),
        "versions": versions(),
    }
    report = build_report(runs, differences, verify_ms=verify_ms, context=context)
    trace = build_trace(runs, num_nodes=report["speculative"]["num_nodes"])
    paths = write_files(
        args.out,
        {
            "report.json": json.dumps(report, indent=2, allow_nan=False) + "\n",
            "report.html": render(report),
            "trace.json": json.dumps(trace, separators=(",", ":")) + "\n",
        },
    )
    print(format_report(report))
    print("\nwrote " + ", ".join(str(path) for path in paths))
    return check_lossless(differences)


def _sizes_that_run(
    bundle: Bundle, decoder: "SpeculativeDecoder", wanted: Sequence[int | str]
) -> list[int | str]:
    """The numbers of nodes that steps really have, each once; says on stderr which those are in place of."""
    from runtime.device.plan import explain_size

    sizes: dict[int | str, None] = {}
    for count in wanted:
        size, line = count, None
        if isinstance(count, int):
            size, line = explain_size(bundle, decoder.batch.runner, None, count)
        sizes[size] = None
        if line:
            print(f"profiler: {line}", file=sys.stderr)
    return list(sizes)


def check_lossless(differences: "Sequence[Difference]") -> int:
    """Print which outputs are wrong, if any, and return the exit status."""
    wrong = [difference for difference in differences if not difference.is_tie]
    for difference in wrong[:5]:
        gap = difference.logit_gap
        reason = "one output ends there" if gap is None else f"logit gap {gap:.2e}"
        print(
            f"NOT LOSSLESS: prompt {difference.prompt + 1}, {difference.setting} nodes: token "
            f"{difference.position} is {difference.token}, plain decoding has {difference.plain_token} "
            f"({reason})",
            file=sys.stderr,
        )
    if wrong:
        print(f"error: {len(wrong)} outputs differ from plain decoding and are no ties", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
