"""Writes prompts whose answers repeat much of them: edits and summaries of texts and functions.

    python -m benchmarks.experiments.copying_prompts --documents docs/*.md runtime/core/*.py \\
        --count 40 --out build/prompts

Takes passages of Markdown files and functions of Python files, spread over all of them, and gives each one of
a few tasks in turn. Writes copying.jsonl for the profiler and the other benchmarks.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.arguments import Parser
from runtime.core.cli import at_least
from runtime.core.errors import UserError
from runtime.core.prompts import read_text
from runtime.profiler.arguments import write_files

TEXT_TASKS = (
    "Correct the spelling and the grammar of this text, and change nothing else:\n\n{}",
    "Summarise this text in three sentences:\n\n{}",
    "Write this text again as a list of points, in its own words:\n\n{}",
    "Which sentence of this text matters most? Quote it, and then say why.\n\n{}",
)
CODE_TASKS = (
    "Rename the first parameter of this function to `value`, and change nothing else:\n\n```python\n{}\n```",
    "Add a comment above every statement of this function:\n\n```python\n{}\n```",
    "Write this function again with an additional keyword argument `verbose` that prints its result:\n\n"
    "```python\n{}\n```",
)
# Sizes of a passage in words, and of a function in lines: enough to copy from, and short enough to read.
WORDS = (80, 250)
LINES = (8, 40)


def main(argv: list[str] | None = None) -> int:
    parser = Parser("benchmarks.experiments.copying_prompts", __doc__)
    parser.add("--documents", type=Path, nargs="+", required=True, help="Markdown and Python files")
    parser.add("--count", type=at_least(1), default=40, help="prompts to write (default 40)")
    parser.add("--out", help="directory of copying.jsonl")
    return parser.run(write, argv)


def write(args: argparse.Namespace) -> int:
    """Read the documents and write the prompts."""
    texts: list[tuple[str, bool]] = []
    for path in args.documents:
        content = read_text("--documents", path)
        is_code = path.suffix == ".py"
        texts += [(found, is_code) for found in (functions(content) if is_code else passages(content))]
    if len(texts) < args.count:
        problem = f"expected {args.count} passages and functions (--count), got {len(texts)}"
        raise UserError(f"--documents: {problem}")
    chosen = [texts[index * len(texts) // args.count] for index in range(args.count)]
    lines = []
    for index, (text, is_code) in enumerate(chosen):
        tasks = CODE_TASKS if is_code else TEXT_TASKS
        lines.append(json.dumps({"prompt": tasks[index % len(tasks)].format(text)}) + "\n")
    (path,) = write_files(args.out, {"copying.jsonl": "".join(lines)})
    print(f"wrote {path}: {len(lines)} prompts from {len(texts)} passages and functions")
    return 0


def passages(markdown: str) -> Iterator[str]:
    """Runs of paragraphs within ``WORDS``, without code, tables, headings, lists and pictures."""
    prose = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    kept: list[str] = []
    for block in [*re.split(r"\n\s*\n", prose), "#"]:
        is_prose = re.match(r"\s*([#|!<>`*-]|\d+\.)", block) is None and block.strip()
        if is_prose:
            kept.append(" ".join(block.split()))
        count = sum(len(part.split()) for part in kept)
        if count >= WORDS[0] or not is_prose:
            if WORDS[0] <= count <= WORDS[1]:
                yield "\n\n".join(kept)
            kept = []


def functions(source: str) -> Iterator[str]:
    """The functions of a module within ``LINES``."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise UserError(f"--documents: Python that cannot be parsed: {error}") from error
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            text = ast.get_source_segment(source, node) or ""
            if LINES[0] <= text.count("\n") + 1 <= LINES[1]:
                yield text


if __name__ == "__main__":
    raise SystemExit(main())
