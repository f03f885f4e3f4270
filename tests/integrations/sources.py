"""What tests read in the sources of an engine, which cannot be imported without a GPU."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definition(tree: ast.AST, name: str) -> Any:
    found = [node for node in ast.walk(tree) if getattr(node, "name", None) == name]
    assert found, f"no definition of {name}"
    return found[0]


def calls(tree: ast.AST, text: str) -> list[ast.Call]:
    """The calls of a function, written as here, in the order of their lines."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == text]
    return sorted(found, key=lambda call: call.lineno)


def parameters(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def fields(tree: ast.AST, name: str) -> dict[str, str]:
    """The annotated fields of a class and of its bases in the same file: their types, as they are written."""
    return {field: ast.unparse(line.annotation) for field, line in _declarations(tree, name).items()}


def limits(tree: ast.AST, name: str) -> dict[str, dict[str, float]]:
    """The limits of the fields of a class and of its bases: what ``Field(ge=..., le=...)`` is given."""
    found = {}
    for field, line in _declarations(tree, name).items():
        keywords = line.value.keywords if isinstance(line.value, ast.Call) else []
        found[field] = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in keywords
            if keyword.arg in ("ge", "gt", "le", "lt")
        }
    return found


def _declarations(tree: ast.AST, name: str) -> dict[str, ast.AnnAssign]:
    node = definition(tree, name)
    found: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and any(getattr(n, "name", None) == base.id for n in ast.walk(tree)):
            found |= _declarations(tree, base.id)
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found[line.target.id] = line
    return found


def members(tree: ast.AST, owner: str) -> Iterator[str]:
    """The members that are read of something with this name, or asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner:
            if isinstance(node.ctx, ast.Load):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
            # With a third argument, the code does without the member.
            model, *names = node.args
            if ast.unparse(model) == owner and len(names) == 1:
                yield ast.literal_eval(names[0])
