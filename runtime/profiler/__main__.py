"""Measure speculative decoding against plain decoding, on the same engine and the same prompts.

    python -m runtime.profiler --bundle engines/ --prompts prompts.jsonl --out report/
    python -m runtime.profiler --bundle engines/ --prompts prompts.jsonl --out report/ --repeats 3

Writes ``report.json``, ``report.html`` (opens without a network) and ``trace.json`` (for
https://ui.perfetto.dev) and prints the same numbers. Exits with 1 when an output differs from plain
decoding and the two tokens are no tie, with 2 when the input cannot be used.
"""

import argparse
import shlex
import sys
from functools import partial

from runtime.core.bundle import METHODS, STEPS, Bundle
from runtime.core.cli import AUTO, Parser, at_least, exit_status
from runtime.core.errors import UserError
from runtime.core.options import SHAPES, TREE, choose_method, current_method
from runtime.core.prompts import read_prompts
from runtime.profiler.arguments import add_arguments, check_out, node_counts_or_auto


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)

    def command() -> int:
        bundle = Bundle.load(args.bundle, verify=False)  # the decoders verify the files
        if bundle.manifest.drafter is None and not args.prompt_lookup:
            raise UserError(
                f"{args.bundle}: the bundle has no draft head to profile; "
                "build it with export/build_engines.py --drafter, or profile --prompt-lookup"
            )
        args.method = choose_method(bundle.manifest, args.method, args.bundle, option="--method")
        prompts = read_prompts(args.prompts)[: args.max_prompts]
        check_out(args.out)
        from runtime.profiler.profile import profile  # imports numba and ONNX Runtime

        return profile(args, bundle, prompts, shlex.join(["python", "-m", "runtime.profiler", *argv]))

    return exit_status("profiler", command, interrupted="interrupted: no report was written")


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
    add(
        "--method",
        type=current_method,
        choices=METHODS,
        help="of the speculative runs (default: draft)",
    )
    add("--kept-nodes", type=at_least(1), help="of speculative streams, as in runtime.generate")
    text_of = "draft also what followed the last tokens earlier in the text, as in runtime.generate"
    add("--prompt-lookup", action="store_true", help=text_of)
    add("--step", choices=STEPS, help="what runs a step: the host, or graphs on a device")
    add("--device", help="of graph steps: cpu, or a GPU as cuda:0")
    add("--warmup", type=at_least(0), default=2, help="prompts decoded untimed first")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
