"""Converts a model to an engine's files, in a process of its own, which gives its memory back.

python -m benchmarks.peers.convert --engine llama.cpp --model MODEL_DIR --precision int8 --out DIR
"""

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.arguments import Parser
from benchmarks.peers.engine import ENGINES, PRECISIONS


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.peers.convert", __doc__)
    parser.add("--engine", choices=tuple(ENGINES), required=True, help="engine that reads the files")
    parser.add("--model", type=Path, required=True, help="Hugging Face model directory")
    parser.add("--drafter", type=Path, help="draft head of ours")
    parser.add("--precision", choices=PRECISIONS, required=True, help="of the weights")
    parser.add(
        "--scales", help="what shares a scale in our quantised weights, as the flag of ctc build takes it"
    )
    parser.add("--out", help="directory of the files, an empty one")
    return parser.run(convert, argv)


def convert(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    engine = ENGINES[args.engine]
    module = importlib.import_module(engine.module)
    options = {"scales": args.scales} if engine.is_ours else {}
    module.convert(args.model, args.out, engine.forms[args.precision], args.drafter, **options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
