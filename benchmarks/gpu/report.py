"""The report as Markdown and as one HTML page."""

from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from benchmarks.gpu.job import DeviceFacts
from benchmarks.gpu.parts import ERROR, FAILED, PASSED, UNCHECKED, Part
from benchmarks.report import markdown_table
from runtime.core.bundle import Bundle
from runtime.profiler.environment import describe_bundle, machine, versions
from runtime.profiler.report_html import card, html_table, page, tile

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
