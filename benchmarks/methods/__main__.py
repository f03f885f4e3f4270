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
method NAME. A head is decoded with its natural search (``natural_search``) unless ``DIR:SEARCH``
names another, which then shows in its label; ``DIR:own`` gives streams a pass of their own. Stopped with
Ctrl-C or otherwise, the same command continues; a speedup is a ratio within one prompt, so it does not
matter when the prompt was run. Only what was given is compared when continuing, not the project's own code:
start anew after changing it.

Exits with 1 when an output differs from plain decoding and the two tokens are no tie, with 2 when the
input cannot be used, with 130 for Ctrl-C.
"""

import argparse
from pathlib import Path

from benchmarks.arguments import Parser, read_prompt_files
from export.options import Options
from export.quantisation.precision import ONNXRUNTIME_PRECISIONS
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.profiler.arguments import node_counts

MODEL = Path("demo/backbone")
HEADS = Path("demo/heads")


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, or 1 for a mismatch, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.methods", __doc__)
    parser.add("--model", type=Path, default=MODEL, help="Hugging Face model directory")
    parser.add(
        "--heads",
        nargs="+",
        metavar="DIR[:WAY]",
        help=f"draft heads (default: those of the model in {HEADS})",
    )
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
    return parser.run(run, argv, interrupted="interrupted; the same command continues")


def run(args: argparse.Namespace) -> int:
    """Check what needs no library, then compare."""
    prompts = read_prompt_files(args.prompts, args.max_prompts)
    if not (args.model / "config.json").is_file():
        raise UserError(f"--model: {args.model} has no config.json; expected a Hugging Face model directory")
    from benchmarks.methods.compare import compare  # imports torch and ONNX Runtime
    from benchmarks.methods.heads import default_heads

    args.heads = args.heads or default_heads(HEADS, args.model)
    return compare(args, prompts)


if __name__ == "__main__":
    raise SystemExit(main())
