"""Engines side by side: the same weights and prompts, one machine, one text at a time on the processor.

    python -m benchmarks.peers --model MODEL_DIR --drafter heads/ctc --prompts a.jsonl --out build/peers
    python -m benchmarks.peers --model model.gguf --prompts a.jsonl --precisions int8 --out build/peers

Converts the model for every engine, opens each in a process of its own, and decodes the prompts greedily
with all of them in turns. Writes to OUT:

    peers.json    "rows", one an engine, precision and method: ms_per_token (the median over prompts) with
                  quartiles, tokens, same_tokens (before the first difference from ours-plain in the same
                  precision), resident_mb, prompt_ms and prompt_tokens_per_s (until the first token comes, the
                  medians over prompts); beside them settings, machine, versions and what was
                  left out
    peers.md      the table
    peers.svg     the same as bars
    models/       the converted models, which the next run uses again
    logs/         what the engines print

An engine that is not installed is left out, with a line that says how to get it. ms_per_token is the time
from the first tokens to the last, by the number of tokens after the first ones, so reading the prompt does
not count. No token ends a text, so all engines write as many. Prompt lookup is each engine's own.

Exits with 2 when the input cannot be used, with 130 for Ctrl-C.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.arguments import Parser, names
from benchmarks.peers.engine import ENGINES, METHODS, PRECISIONS
from export.options import INT8_SCALES, Options
from export.quantisation.precision import BLOCK_SIZES
from runtime.core.cli import AUTO, at_least, num_nodes


def main(argv: list[str] | None = None) -> int:
    """Command line; 0, 2 for input that cannot be used, 130 for Ctrl-C."""
    parser = Parser("benchmarks.peers", __doc__)
    parser.add("--model", type=Path, required=True, help="Hugging Face model directory, or a GGUF file")
    parser.add("--drafter", type=Path, help="draft head of ours-speculative")
    parser.add("--prompts", "--max-new-tokens", "--repeats", "--threads")
    parser.add("--num-prompts", type=at_least(1), help="use so many prompts from the beginning of a file")
    text = "of the weights, a comma list"
    parser.add("--precisions", type=names(PRECISIONS), default="fp32,int8,int4", help=text)
    text = f"a comma list of {', '.join(ENGINES)}; ours-plain always runs (default all)"
    parser.add_argument("--engines", type=names(ENGINES), default=",".join(ENGINES), help=text)
    text = "ways of decoding, a comma list"
    parser.add("--methods", type=names(METHODS), default=",".join(METHODS), help=text)
    text = "drafts of prompt lookup in llama.cpp, OpenVINO and Transformers"
    parser.add("--lookup-tokens", type=at_least(1), default=4, help=text)
    text = "draft nodes of our steps, or auto"
    parser.add("--num-nodes", type=num_nodes, default=AUTO, help=text)
    text = "what shares a scale in our int8 weights, as in ctc build"
    parser.add("--int8-scales", choices=INT8_SCALES, default=Options.int8_scales, help=text)
    text = "rows that share a scale in our int4 weights, as in ctc build"
    sizes, size = BLOCK_SIZES[::-1], Options.int4_block_size
    parser.add("--int4-block-size", type=int, choices=sizes, default=size, help=text)
    text = "open one engine at a time, anew for every prompt, for models that do not fit in memory many times"
    parser.add_argument("--one-at-a-time", action="store_true", help=text)
    parser.add("--out", help="directory of the report and of the converted models")
    return parser.run(run, argv)


def run(args: argparse.Namespace) -> int:
    """Import what takes seconds, then compare."""
    from benchmarks.peers.compare import compare

    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
