"""The report as one HTML page that needs nothing else: own SVG charts, every number in a table too."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from runtime.engines.recorder import STAGES
from runtime.profiler import svg
from runtime.profiler.report import OTHER
from runtime.profiler.tables import Table, rows_by_setting, tables

# The page around the cards; its style has a colour for every stage.
TEMPLATE = Path(__file__).with_name("page.html")


def render(report: Mapping[str, Any]) -> str:
    """Return the page for the contents of ``report.json``."""
    bundle, settings, machine = report["bundle"], report["settings"], report["machine"]
    best, check = report["speculative"], report["lossless"]
    outputs = f"outputs identical; {check['ties']} ties, {check['mismatches']} mismatches"
    tiles = [
        tile(f"{best['gamma']:.2f}x", "speedup over plain decoding (gamma)"),
        tile(f"{best['beta']:.2f}", "tokens per verify step (beta)"),
        tile(f"{best['ms_per_token']:.2f} ms", f"per token with {best['num_nodes']} draft nodes"),
        tile(f"{report['vanilla']['ms_per_token']:.2f} ms", "per token in plain decoding"),
        tile(f"{check['identical']}/{check['prompts']}", outputs, "bad" if check["mismatches"] else "good"),
    ]
    makers = [_sizes, _stages, _acceptance, _speedups, _facts]
    if report["verify_ms_by_tree_size"]:
        makers.insert(-1, _verify)
    lead = (
        f"{settings['num_prompts']} prompts, {settings['max_new_tokens']} new tokens at most, "
        f"{machine['cpu']}, {machine['threads']} threads"
    )
    title = f"{bundle['model']} with a {bundle['drafter_type']} draft head"
    return page(title, lead, tiles, [make(report) for make in makers])


def page(title: str, lead: str, tiles: Sequence[str], cards: Sequence[str]) -> str:
    """Return a whole page: texts that are escaped here, and HTML of ``tile`` and ``card``."""
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), lead=escape(lead), tiles="".join(tiles), cards="\n".join(cards)
    )


def tile(value: str, text: str, style: str = "") -> str:
    """Return a number with what it says below; ``style``: ``good``, ``bad`` or none."""
    return f'<div class="tile"><b class="{style}">{value}</b><span>{escape(text)}</span></div>'


def _sizes(report: Mapping[str, Any]) -> str:
    text = "Plain decoding and every tree size measured; the fastest is in bold and shown below."
    best = f"{report['speculative']['num_nodes']} nodes"
    return card("Tree sizes", text, html_table(tables(report)["settings"], best=best))


def _stages(report: Mapping[str, Any]) -> str:
    stacks = [
        (name, [(stage, values["mean"]) for stage, values in row["stages_ms"].items()])
        for name, row in rows_by_setting(report).items()
    ]
    legend = "".join(f'<span><i class="{stage}"></i>{stage}</span>' for stage in (*STAGES, OTHER))
    text = f"Mean step by stage, ms; the table is for {report['speculative']['num_nodes']} draft nodes."
    chart = svg.stacked(stacks, x_title="ms per step") + f'<div class="legend">{legend}</div>'
    return card("Where a step goes", text, chart, html_table(tables(report)["stages"]))


def _acceptance(report: Mapping[str, Any]) -> str:
    title = "Acceptance by depth"
    text = "Share of steps that accepted a draft at each depth of the tree."
    rows = report["speculative"]["acceptance_by_depth"]
    if not rows:
        return card(title, text, "<p>No draft was accepted.</p>")
    chart = svg.bars(
        [row["accepted"] for row in rows],
        [str(row["depth"]) for row in rows],
        x_title="depth, tokens after the root",
        y_title="share of steps",
        top=1.0,
    )
    return card(title, text, chart, html_table(tables(report)["depths"]))


def _speedups(report: Mapping[str, Any]) -> str:
    rows = [row for row in report["prompts"] if row["speedup"] is not None]
    rows.sort(key=lambda row: row["speedup"])
    spread = report["speculative"]["speedup_per_prompt"]
    quantiles = ", ".join(f"{name} {spread[name]:.2f}" for name in ("median", "p5", "p95"))
    chart = svg.dots(
        [row["speedup"] for row in rows],
        [f"prompt {row['prompt'] + 1}: {row['speedup']:.2f}x, beta {row['beta']:.2f}" for row in rows],
        x_title="prompts, slowest to fastest",
        y_title="speedup",
        median=spread["median"],
    )
    table = f"<details><summary>All prompts</summary>{html_table(tables(report)['prompts'])}</details>"
    return card("Speedup per prompt", f"Over plain decoding, the dotted line: {quantiles}.", chart, table)


def _verify(report: Mapping[str, Any]) -> str:
    passes = report["verify_ms_by_tree_size"]
    length = report["settings"]["verify_prefix_length"]
    text = f"Median time of one pass of the target model by nodes (root and drafts), after {length} tokens."
    medians = [row["p50"] for row in passes.values()]
    chart = svg.line([int(n) for n in passes], medians, x_title="nodes in the pass", y_title="ms")
    return card("Verify time by tree size", text, chart, html_table(tables(report)["passes"]))


def _facts(report: Mapping[str, Any]) -> str:
    rows = [["", ""], ["command", report["command"]]]
    for group in ("bundle", "machine", "versions"):
        rows += [[f"{group}: {key}", str(value)] for key, value in report[group].items()]
    return card("How it was measured", "", html_table(rows, style="facts"))


def card(title: str, text: str, *body: str) -> str:
    """Return a part of the page; ``body`` is HTML."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(body)}</section>"


def html_table(table: Table, *, style: str = "", best: str | None = None) -> str:
    """Return an HTML table; ``best`` is the first cell of the row in bold."""
    head, *rows = table
    cells = "".join(f"<th>{escape(name)}</th>" for name in head if name)
    body = ""
    for row in rows:
        line = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f"<tr{' class=best' if row[0] == best else ''}>{line}</tr>"
    return f'<table class="{style}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
