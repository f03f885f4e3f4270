"""Hours, memory and disk of training a head, by the size of the target model.

    python -m benchmarks.experiments.training_cost --out build/training_cost
    python -m benchmarks.experiments.training_cost --shapes 0.5b --out build/training_cost

Random models, random prompts, and the settings that training recommends. 0.5b has the vocabulary of Qwen3,
1.2b is of the shape of Llama 3.2 1B. A random model writes as fast as a trained one; what a trained head is
worth is not measured here.
"""

import argparse
import json
import random
import re
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, names
from benchmarks.experiments.random_model import save_random_model
from benchmarks.report import markdown_table, write_report
from drafters.build import load_drafter
from runtime.core.cli import at_least
from training.loop.progress import TIMED_STEPS

ROOT = Path(__file__).parents[2]

# Embedding and LM head are one matrix, as in these models. Rotary embeddings and norms are a Llama's.
SHAPES: dict[str, dict[str, int]] = {
    "0.1b": {"layers": 12, "hidden": 768, "intermediate": 2048, "heads": 12, "kv_heads": 4, "vocab": 32000},
    "0.5b": {
        "layers": 28, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "vocab": 151936,
    },
    "1.2b": {
        "layers": 16, "hidden": 2048, "intermediate": 8192, "heads": 32, "kv_heads": 8, "vocab": 128256,
    },
}  # fmt: skip
PROMPT_LENGTH = 64


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.training_cost", __doc__)
    parser.add("--shapes", type=names(SHAPES), default=",".join(SHAPES), help="a comma list")
    parser.add("--num-prompts", type=at_least(2), default=32, help="random prompts of 64 tokens")
    parser.add("--new-tokens", type=at_least(1), default=64, help="length of a continuation")
    parser.add("--train-flags", default="", help="further flags for training.train")
    parser.add("--out", help="directory of training_cost.json and training_cost.md")
    return parser.run(measure, argv)


def measure(args: argparse.Namespace) -> int:
    """Train heads for all shapes, write and print the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.shapes:
        with tempfile.TemporaryDirectory(dir=args.out) as scratch:
            rows.append({"shape": name, **train(Path(scratch).resolve(), SHAPES[name], args)})
    header = list(rows[0])
    table = markdown_table(header, [[str(row[key]) for key in header] for row in rows])
    settings = {"prompts": args.num_prompts, "new_tokens": args.new_tokens, "train_flags": args.train_flags}
    report = {"rows": rows, **settings}
    write_report(args, "training_cost.json", report, texts={"training_cost.md": table + "\n"})
    print(table)
    return 0


def train(directory: Path, shape: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """The costs of one shape."""
    model = save_random_model(
        directory / "model",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    letters = random.Random(0)
    prompts = [
        "".join(letters.choices(string.ascii_letters, k=PROMPT_LENGTH)) for _ in range(args.num_prompts)
    ]
    (directory / "data.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    head = directory / "head"
    said = run(directory, head, args)
    trained = sum(parameter.numel() for parameter in load_drafter(head).parameters())
    return {
        "parameters, M": round(num_parameters / 1e6),
        "head, M": round(trained / 1e6, 1),
        "tokens/s of continuations": number(r"([\d.,]+) tokens/s$", said),
        "s/step": number(r"about ([\d.e+]+) s a step", said),
        "GiB at the peak": number(r"at most ([\d.,]+) GiB", said),
        "head on disk, MB": round((head / "model.safetensors").stat().st_size / 1e6),
    }


def run(directory: Path, head: Path, args: argparse.Namespace) -> str:
    """Train in a process of its own; returns what it said."""
    settings = {
        "model": directory / "model",
        "data": directory / "data.jsonl",
        "out": head,
        "max-new-tokens": args.new_tokens,
        # The first step loads libraries, the next ones are timed.
        "steps": TIMED_STEPS + 1,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "training.train", *flags, *args.train_flags.split()]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"training failed with code {done.returncode}")
    return done.stdout


def number(pattern: str, text: str) -> float:
    """The number in the one line that has it."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return float(found.replace(",", ""))


if __name__ == "__main__":
    raise SystemExit(main())
