"""The parts of the report: each is measured on its own, and all are written as Markdown and one HTML page."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from benchmarks.gpu.decoders import Skip
from benchmarks.gpu.job import DeviceFacts
from benchmarks.report import markdown_table
from runtime.core.bundle import Bundle
from runtime.profiler.environment import describe_bundle, machine, versions
from runtime.profiler.report import Table
from runtime.profiler.report_html import card, html_table, page, tile

# Statuses of a part. Only verifications pass or fail. ``error``: the part could not be finished.
# ``not checked``: a verification had nothing to compare with.
PASSED, FAILED, UNCHECKED = "passed", "failed", "not checked"
MEASURED, SKIPPED, ERROR = "measured", "skipped", "error"
TITLES = {
    "gate": "Gate: does the device compute what the reference computes",
    "lossless": "Lossless: speculative and plain steps write the same",
    "bandwidth": "Plain decoding as a share of the memory's bandwidth",
    "tree_sizes": "Step time by the size of the tree",
    "stages": "Stages of a step, by events",
    "host_gap": "Host work in a captured step",
    "batches": "Tokens a second by batch and context",
    "peers": "Other programs",
}
STYLES = {PASSED: "good", FAILED: "bad", UNCHECKED: "bad", ERROR: "bad"}
ON_A_CPU = "The CPU was measured ({cpu}), and no GPU: the numbers say that everything works, and no more."


@dataclass
class Part:
    """The results of a part.

    tables: by caption, each with its header as the first row
    charts: SVG texts
    data: the numbers behind the tables, for ``gpu.json``
    """

    status: str = MEASURED
    reason: str = ""
    seconds: float = 0.0
    tables: dict[str, Table] = field(default_factory=dict)
    charts: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, "seconds": self.seconds, **self.data}


def run_part(measure: Callable[[], Part], *, after_error: Callable[[], None]) -> Part:
    """Call ``measure``. If it raises, return a part that says why.

    after_error: clears away what may be broken, so that the next part begins anew
    """
    began = time.perf_counter()
    try:
        part = measure()
    except Skip as skip:
        part = Part(SKIPPED, str(skip))
    except Exception as error:
        # The other parts are still useful.
        part = Part(ERROR, f"{type(error).__name__}: {error}")
        after_error()
    part.seconds = time.perf_counter() - began
    return part


def is_bad(parts: Mapping[str, Part], checks: Sequence[str]) -> bool:
    """Whether a check among these failed, had nothing to compare with, or could not be finished."""
    return any(parts[name].status in (FAILED, UNCHECKED, ERROR) for name in checks if name in parts)


def cell(value: float | str | None, digits: int = 3) -> str:
    """A number for a table; a dash where there is none."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def as_markdown(title: str, facts: DeviceFacts, parts: Mapping[str, Part]) -> str:
    """Headings, what every part says of itself, and its tables."""
    lines = [f"# {title}", "", _lead(facts), ""]
    for name, part in parts.items():
        lines += [f"## {TITLES[name]}", "", _status(part), ""]
        for caption, (head, *rows) in part.tables.items():
            lines += [f"{caption}:", "", markdown_table(head, _escaped(rows)), ""]
    return "\n".join(lines)


def as_page(
    title: str,
    facts: DeviceFacts,
    parts: Mapping[str, Part],
    command: str,
    bundle: Bundle,
    threads: int | None,
) -> str:
    """The same with charts, and with what ran where."""
    tiles = [
        tile(parts[name].status, TITLES[name], STYLES.get(parts[name].status, ""))
        for name in parts
        if parts[name].status in STYLES
    ]
    cards = []
    for name, part in parts.items():
        body = list(part.charts)
        for caption, table in part.tables.items():
            body += [f"<p>{escape(caption)}</p>", html_table(table)]
        cards.append(card(TITLES[name], _status(part), *body))
    rows = [["", ""], ["command", command]]
    groups: dict[str, Mapping[str, Any]] = {
        "device": asdict(facts),
        "bundle": describe_bundle(bundle),
        "machine": machine(threads),
        "versions": versions(),
    }
    for group, values in groups.items():
        rows += [[f"{group}: {key}", str(value)] for key, value in values.items()]
    cards.append(card("How it was measured", "", html_table(rows, style="facts")))
    return page(title, _lead(facts), tiles, cards)


def _lead(facts: DeviceFacts) -> str:
    if not facts.is_gpu:
        return ON_A_CPU.format(cpu=machine(None)["cpu"])
    memory = f", {facts.memory_bytes / 2**30:.0f} GiB" if facts.memory_bytes else ""
    speed = f", {facts.bandwidth / 1e9:.0f} GB/s" if facts.bandwidth else ""
    return f"Measured on {facts.name} ({facts.capability or 'unknown capability'}{memory}{speed})."


def _status(part: Part) -> str:
    return f"{part.status}, {part.seconds:.0f} s" + (f": {part.reason}" if part.reason else "")


def _escaped(rows: list[list[str]]) -> list[list[str]]:
    """Cells that cannot end a row of Markdown."""
    return [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
