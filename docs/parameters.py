"""Makes lists of the lines ``name: text`` in docstrings, for the page of the Python API."""

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"(\w+(?:, \w+)*): (.*)")


class Parameters(griffe.Extension):
    """Changes the docstrings that mkdocstrings shows, and no others."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """A docstring in Markdown: parameters are a list, and what follows them is a paragraph of its own."""
    lines: list[str] = []
    in_list = False
    for line in text.splitlines():
        found = PARAMETER.fullmatch(line)
        if found:
            lines += [] if in_list else [""]
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif in_list and line.strip() and not line.startswith(" "):
            lines += ["", line]
        else:
            lines.append(line)
        in_list = bool(found) or (in_list and line.startswith(" "))
    return "\n".join(lines)
