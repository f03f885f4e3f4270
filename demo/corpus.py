"""The training text of the demo's target model: grade-school maths and the Python standard library.

Two sources, both under permissive licences:

* GSM8K's training split (MIT), a jsonl of ``question`` and ``answer``, written as a dialogue;
* the standard library of the running interpreter (PSF licence), as whole files and, where a
  function has a docstring, as a request to complete it.
"""

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from runtime.core.cli import Parser, exit_status
from runtime.core.errors import UserError
from runtime.core.prompts import read_text

END_OF_TEXT = "<|endoftext|>"
QUESTION = "Q: {question}\nA:"
# Tests, vendored copies, and tables of data, which a model of this size cannot learn.
EXCLUDED_PARTS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo"}
EXCLUDED_PARTS |= {"encodings", "pydoc_data", "entities.py"}


def dialogue(question: str, answer: str) -> str:
    """One question and its answer, in the form the demo's chat template produces."""
    return f"{QUESTION.format(question=question.strip())} {answer.strip()}"


def gsm8k_documents(path: Path) -> list[str]:
    """All documents of a GSM8K jsonl file. Raises UserError naming a malformed line."""
    documents = []
    # Not splitlines(): questions hold other line separators, such as U+2028.
    for number, line in enumerate(read_text("--gsm8k", path).rstrip("\n").split("\n"), 1):
        try:
            row = json.loads(line)
            documents.append(dialogue(row["question"], row["answer"]))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            expected = "expected an object with 'question' and 'answer'"
            raise UserError(f"--gsm8k: {path}:{number}: {expected}, got {line[:60]!r}") from error
    return documents


def python_documents() -> list[str]:
    """The standard library: every file, and every documented function as a completion task."""
    documents = []
    for source, tree in _library():
        documents.append(source)
        documents.extend(dialogue(question, answer) for question, answer in _tasks(source, tree))
    return documents


def python_tasks() -> list[tuple[str, str]]:
    """The completion tasks alone: (request, solution)."""
    return [task for source, tree in _library() for task in _tasks(source, tree)]


def _library() -> Iterator[tuple[str, ast.Module]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if EXCLUDED_PARTS & set(path.relative_to(root).parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            yield source, ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue


def _tasks(source: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        docstring = node.body[0]
        if docstring.end_lineno is None or node.end_lineno is None or node.end_lineno - node.lineno > 60:
            continue
        head = "\n".join(lines[node.lineno - 1 : docstring.end_lineno])
        whole = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        yield (
            f"Write a solution to the following problem:\n```python\n{head}\n```",
            f"```python\n{whole}\n```",
        )


def is_held_out(document: str) -> bool:
    """Whether a document is of the validation set, 2 % of all: decided by its own hash, so it is stable."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:4], "big") % 50 == 0


def main(argv: list[str] | None = None) -> int:
    """Write the completion tasks as training prompts for a draft head."""
    parser = Parser("corpus", "demo.corpus", main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="jsonl file of prompt and completion")
    args = parser.parse_args(argv)
    return exit_status("corpus", lambda: write_tasks(args))


def write_tasks(args: argparse.Namespace) -> int:
    rows = [json.dumps({"prompt": request, "completion": solution}) for request, solution in python_tasks()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    print(f"wrote {len(rows)} prompts to {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
