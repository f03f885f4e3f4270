"""The work of ``python -m runtime.profiler``: measure, write the three files, print the tables."""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from runtime.core.baselines import SEARCHES
from runtime.core.bundle import PLAIN as PLAIN_METHOD
from runtime.core.bundle import Bundle
from runtime.core.cli import AUTO
from runtime.core.errors import UserError
from runtime.core.options import DEFAULT_NUM_NODES
from runtime.core.prompts import Prompt
from runtime.core.system import git_sha
from runtime.decode.budget import FixedBudget
from runtime.decode.step import HostStep
from runtime.decoder import SpeculativeDecoder, encode_prompts
from runtime.device.plan import explain_size
from runtime.profiler.arguments import write_files
from runtime.profiler.environment import describe_bundle, machine, versions
from runtime.profiler.measure import Setting, compare_outputs, measure_runs, time_verify
from runtime.profiler.report import build_report, build_trace, format_report
from runtime.profiler.report_html import render
from runtime.profiler.runs import PLAIN, TIE_TOLERANCE, Difference

TREE_SIZES = (1, 2, 4, 8, 16, 32)


def profile(args: argparse.Namespace, bundle: Bundle, texts: Sequence[Prompt], command: str) -> int:
    """Measure, write and print the report; 1 for an output that is neither identical nor a tie."""
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
    prompts = encode_prompts(
        plain,
        texts,
        max_new_tokens=args.max_new_tokens,
        where=f"{args.prompts}:",
    )
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
    bundle: Bundle, decoder: SpeculativeDecoder, wanted: Sequence[int | str]
) -> list[int | str]:
    """The numbers of nodes that steps really have, each once; says on stderr which those are in place of."""
    sizes: dict[int | str, None] = {}
    for count in wanted:
        size, line = count, None
        if isinstance(count, int):
            size, line = explain_size(bundle, decoder.batch.runner, None, count)
        sizes[size] = None
        if line:
            print(f"profiler: {line}", file=sys.stderr)
    return list(sizes)


def check_lossless(differences: Sequence[Difference]) -> int:
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
