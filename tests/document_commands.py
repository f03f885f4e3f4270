"""Commands in the fenced blocks of the documents, as lists of words."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*.md")),
    ROOT / "demo/README.md",
)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``reason`` says why it is not run, and is None for one that may be."""

    language: str
    text: str
    reason: str | None

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without comments and what follows a pipe or a redirection."""
        pending = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quoted text that goes on in the next line
                continue
            pending = ""
            yield from _parts(words)
        assert not pending, pending


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document; ``<!-- not tested: REASON -->`` may stand above one."""
    pattern = r"(?:<!-- not tested: ([^>]*) -->\n)?^```(\w*)\n(.*?)^```"
    found = re.findall(pattern, document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(language, text, reason or None) for reason, language, text in found]


def shell_blocks(document: Path) -> list[Block]:
    return [block for block in blocks(document) if block.language == "bash"]


def _parts(words: list[str]) -> Iterator[list[str]]:
    """The commands of ``a && b | c > d``, without those behind a pipe and without settings of variables."""
    while words:
        ends = [i for i, word in enumerate(words) if word in ("&&", "&", "|", ">", ";")]
        end = min(ends, default=len(words))
        part = words[:end]
        while part and re.fullmatch(r"[A-Za-z_]+=.*", part[0]):
            part = part[1:]
        if part:
            yield part
        words = words[end + 1 :] if end < len(words) and words[end] in ("&&", "&", ";") else []
