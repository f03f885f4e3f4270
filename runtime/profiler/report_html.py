"""The report as one HTML page that needs nothing else: own SVG charts, every number in a table too.

Charts are inline SVG text, whose colours are CSS classes and variables of the page around them. Every mark
carries a ``<title>``, which browsers show as a tooltip.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from runtime.core.bundle import PLAIN as PLAIN_METHOD
from runtime.engines.recorder import STAGES
from runtime.profiler.report import OTHER, Table, explanation, rows_by_setting, tables, verdict

WIDTH, HEIGHT = 560, 250
# The edges of the plotted area.
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 16, 14, HEIGHT - 42


def ticks(high: float, count: int = 5) -> list[float]:
    """Return round values from zero that cover ``high``. Example: 7.2 -> 0, 2, 4, 6, 8."""
    high = high if high > 0 else 1
    power = 10 ** math.floor(math.log10(high / count))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if high / (m * power) <= count)
    return [round(index * step, 10) for index in range(math.ceil(high / step - 1e-9) + 1)]


def bars(values: Sequence[float], labels: Sequence[str], *, x_title: str, y_title: str, top: float) -> str:
    """Draw upright bars from zero, one a label; ``top`` ends the axis; values stand on the bars."""
    y_of, parts = _axes(ticks(top), x_title, y_title)
    slot = (RIGHT - LEFT) / len(values)
    width = min(slot * 0.7, 48)
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        middle, y = LEFT + slot * (index + 0.5), y_of(value)
        place = {"x": middle - width / 2, "y": y, "width": width, "height": BOTTOM - y, "rx": 3}
        parts.append(_mark("rect", "mark", f"{label}: {value:.3f}", **place))
        if slot >= 30:  # narrower bars leave no room for numbers
            parts.append(_text(middle, y - 5, f"{value:.2f}", "value"))
        parts.append(_text(middle, BOTTOM + 17, label))
    return _svg(parts, HEIGHT, y_title)


def line(xs: Sequence[float], ys: Sequence[float], *, x_title: str, y_title: str) -> str:
    """Draw a line with a labelled marker at each point; both axes are linear, y starts at zero."""
    y_of, parts = _axes(ticks(max(ys)), x_title, y_title)
    scale = (RIGHT - LEFT - 24) / (max(xs) or 1)
    points = [(LEFT + 12 + x * scale, y_of(y)) for x, y in zip(xs, ys, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline class="line" points="{path}"/>')
    last_label = -math.inf
    for (x, y), x_value, y_value in zip(points, xs, ys, strict=True):
        parts.append(_mark("circle", "dot", f"{x_value:g}: {y_value:.3f}", cx=x, cy=y, r=4.5))
        if x - last_label >= 26:  # neighbours that would overlap stay in the table
            parts.append(_text(x, max(y - 10, TOP - 2), f"{y_value:.1f}", "value"))
            parts.append(_text(x, BOTTOM + 17, f"{x_value:g}"))
            last_label = x
    return _svg(parts, HEIGHT, y_title)


def dots(values: Sequence[float], titles: Sequence[str], *, x_title: str, y_title: str, median: float) -> str:
    """Draw one dot a value, in the given order, with lines at 1 and at the median."""
    y_of, parts = _axes(ticks(max(*values, 1.0)), x_title, y_title)
    slot = (RIGHT - LEFT) / len(values)
    radius = max(2.5, min(5.0, slot * 0.4))
    parts += [_rule(LEFT, RIGHT, y_of(1), y_of(1), "even")]
    parts += [_rule(LEFT, RIGHT, y_of(median), y_of(median), "median")]
    for index, (value, title) in enumerate(zip(values, titles, strict=True)):
        parts.append(_mark("circle", "dot", title, cx=LEFT + slot * (index + 0.5), cy=y_of(value), r=radius))
    return _svg(parts, HEIGHT, y_title)


def stacked(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, x_title: str) -> str:
    """Draw horizontal bars, each a stack of (class, value) parts; a part's class gives its colour."""
    left, thick, gap = 84, 26, 14
    bottom = TOP + len(rows) * (thick + gap) - 6
    totals = [sum(value for _, value in stack) for _, stack in rows]
    marks = ticks(max(totals))
    scale = (RIGHT - left - 44) / marks[-1]
    parts = []
    for mark in marks:
        x = left + mark * scale
        parts += [_rule(x, x, TOP, bottom, "grid"), _text(x, bottom + 15, f"{mark:g}")]
    for index, ((label, stack), total) in enumerate(zip(rows, totals, strict=True)):
        x, y = float(left), TOP + index * (thick + gap) + gap / 2
        parts.append(_text(left - 8, y + thick / 2 + 4, label, "end"))
        for name, value in stack:
            width = value * scale
            # A hairline of the page's colour keeps neighbours apart.
            place = {"x": x, "y": y, "width": max(width - 1.5, width / 2), "height": thick}
            parts.append(_mark("rect", f"part {name}", f"{label}, {name}: {value:.3f} ms", **place))
            x += width
        parts.append(_text(x + 6, y + thick / 2 + 4, f"{total:.2f}", "value start"))
    parts.append(_text((left + RIGHT) / 2, bottom + 34, x_title, "title"))
    return _svg(parts, bottom + 40, x_title)


def _axes(marks: Sequence[float], x_title: str, y_title: str) -> tuple[Callable[[float], float], list[str]]:
    """Return the function from value to y, and the elements of grid and titles; the axis begins at zero."""

    def y_of(value: float) -> float:
        return BOTTOM - value / marks[-1] * (BOTTOM - TOP)

    parts = []
    for mark in marks:
        y = y_of(mark)
        parts += [_rule(LEFT, RIGHT, y, y, "grid"), _text(LEFT - 8, y + 4, f"{mark:g}", "end")]
    turned = f'transform="translate(13 {(BOTTOM + TOP) / 2:.1f}) rotate(-90)"'
    parts.append(f'<text class="title" {turned}>{escape(y_title)}</text>')
    return y_of, [*parts, _text((LEFT + RIGHT) / 2, HEIGHT - 6, x_title, "title")]


def _rule(x1: float, x2: float, y1: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _mark(tag: str, style: str, title: str, **place: float) -> str:
    where = " ".join(f'{name}="{value:.2f}"' for name, value in place.items())
    return f'<{tag} class="{escape(style)}" {where}><title>{escape(title)}</title></{tag}>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{body}</svg>'


# Tables with more columns than this do not fit the width of a phone.
MANY_COLUMNS = 5
# The files that the profiler writes beside the page.
LINKS = {"report.json": "all numbers", "trace.json": "every step, for ui.perfetto.dev"}
# The page around the cards; its style has a colour for every stage.
TEMPLATE = Path(__file__).with_name("page.html")


def render(report: Mapping[str, Any]) -> str:
    bundle, settings, machine = report["bundle"], report["settings"], report["machine"]
    best, check = report["speculative"], report["lossless"]
    outputs = f"outputs identical; {check['ties']} ties, {check['mismatches']} mismatches"
    speed = (
        "speed of plain decoding (gamma): slower"
        if best["gamma"] < 1
        else "speedup over plain decoding (gamma)"
    )
    plain_ms = report["vanilla"]["ms_per_token"]
    tiles = [
        tile(f"{best['gamma']:.2f}x", speed, "bad" if best["gamma"] < 1 else "good"),
        tile(f"{best['beta']:.2f}", "tokens per verify step (beta)"),
        tile(f"{1000 / best['ms_per_token']:.1f}", f"tokens per second with {best['num_nodes']} draft nodes"),
        tile(f"{1000 / plain_ms:.1f}", f"tokens per second in plain decoding, {plain_ms:.2f} ms per token"),
        tile(f"{check['identical']}/{check['prompts']}", outputs, "bad" if check["mismatches"] else "good"),
    ]
    makers = [_sizes, _stages, _acceptance, _speedups, _facts]
    if report["verify_ms_by_tree_size"]:
        makers.insert(-1, _verify)
    found = " ".join([verdict(report), *explanation(report)])
    lead = (
        f"{found} {settings['num_prompts']} prompts, {settings['max_new_tokens']} new tokens at "
        f"most, {machine['cpu']}, {machine['threads']} threads"
    )
    has_head = settings.get("method") != PLAIN_METHOD
    drafts = f"a {bundle['drafter_type']} draft head" if has_head else "drafts of the text"
    title = f"{bundle['model']} with {drafts}"
    when = [f"measured {report['date']}"] if report.get("date") else []
    versions = report["versions"]
    when += [f"{name} {versions[name]}" for name in ("project", "onnxruntime") if name in versions]
    when += [f"commit {report['commit'][:12]}"] if report.get("commit") else []
    return page(title, lead, tiles, [make(report) for make in makers], about=", ".join(when), links=LINKS)


def page(
    title: str,
    lead: str,
    tiles: Sequence[str],
    cards: Sequence[str],
    *,
    about: str = "",
    links: Mapping[str, str] | None = None,
) -> str:
    """Return a whole page: texts that are escaped here, and HTML of ``tile`` and ``card``.

    about: what was measured when and with which versions
    links: files beside the page, each with what it holds
    """
    files = (
        f'<a href="{escape(name)}">{escape(name)}</a> ({escape(text)})'
        for name, text in (links or {}).items()
    )
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        lead=escape(lead),
        about="; ".join(part for part in (escape(about), *files) if part),
        tiles="".join(tiles),
        cards="\n".join(cards),
    )


def tile(value: str, text: str, style: str = "") -> str:
    """Return a number with what it says below; ``style``: ``good``, ``bad`` or none."""
    return f'<div class="tile"><b class="{style}">{value}</b><span>{escape(text)}</span></div>'


def _sizes(report: Mapping[str, Any]) -> str:
    text = "Plain decoding and every tree size measured; the fastest is in bold and shown below."
    best = f"{report['speculative']['num_nodes']} nodes"
    return card("Tree sizes", text, html_table(tables(report)["settings"], best=best), wide=True)


def _stages(report: Mapping[str, Any]) -> str:
    stacks = [
        (name, [(stage, values["mean"]) for stage, values in row["stages_ms"].items()])
        for name, row in rows_by_setting(report).items()
    ]
    drawn = {stage for _, stack in stacks for stage, value in stack if value > 0}
    entries = [(stage, stage) for stage in (*STAGES, OTHER) if stage in drawn]
    text = f"Mean step by stage, ms; the table is for {report['speculative']['num_nodes']} draft nodes."
    chart = stacked(stacks, x_title="mean ms per step") + _legend(entries)
    return card("Where a step goes", text, chart, html_table(tables(report)["stages"]))


def _acceptance(report: Mapping[str, Any]) -> str:
    title = "Acceptance by depth"
    text = "Share of steps that accepted a draft at each depth of the tree."
    rows = report["speculative"]["acceptance_by_depth"]
    if not rows:
        return card(title, text, "<p>No draft was accepted.</p>")
    chart = bars(
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
    text = (
        f"Over plain decoding; 90 % of the prompts are between {spread['p5']:.2f}x and {spread['p95']:.2f}x."
    )
    chart = dots(
        [row["speedup"] for row in rows],
        [f"prompt {row['prompt'] + 1}: {row['speedup']:.2f}x, beta {row['beta']:.2f}" for row in rows],
        x_title="prompts, slowest to fastest",
        y_title="speedup",
        median=spread["median"],
    ) + _legend([("rule even", "plain decoding, 1x"), ("rule median", f"median, {spread['median']:.2f}x")])
    table = f"<details><summary>All prompts</summary>{html_table(tables(report)['prompts'])}</details>"
    return card("Speedup per prompt", text, chart, table, wide=not report["verify_ms_by_tree_size"])


def _verify(report: Mapping[str, Any]) -> str:
    passes = report["verify_ms_by_tree_size"]
    length = report["settings"]["verify_prefix_length"]
    text = f"Median time of one pass of the target model by nodes (root and drafts), after {length} tokens."
    medians = [row["p50"] for row in passes.values()]
    chart = line([int(n) for n in passes], medians, x_title="nodes in the pass", y_title="median ms")
    return card("Verify time by tree size", text, chart, html_table(tables(report)["passes"]))


def _facts(report: Mapping[str, Any]) -> str:
    rows = [["", ""], ["command", report["command"]]]
    for group in ("bundle", "machine", "versions"):
        rows += [[f"{group}: {key}", str(value)] for key, value in report[group].items()]
    return card("How it was measured", "", html_table(rows, style="facts"), wide=True)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the key of a chart, from the classes of its marks and what they show."""
    items = "".join(f'<span><i class="{style}"></i>{escape(text)}</span>' for style, text in entries)
    return f'<div class="legend">{items}</div>'


def card(title: str, text: str, *body: str, wide: bool = False) -> str:
    """Return a part of the page; ``body`` is HTML; ``wide`` gives it a whole row."""
    style = ' class="wide"' if wide else ""
    return f"<section{style}><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(body)}</section>"


def html_table(table: Table, *, style: str = "", best: str | None = None) -> str:
    """Return an HTML table; ``best`` is the first cell of the row in bold."""
    head, *rows = table
    cells = "".join(f"<th>{escape(name)}</th>" for name in head if name)
    body = ""
    for row in rows:
        # On a phone every row of a table with many columns is a block, and each cell has its column's name.
        names = (f' data-name="{escape(name)}"' if name else "" for name in head)
        line = "".join(f"<td{name}>{escape(cell)}</td>" for name, cell in zip(names, row, strict=True))
        body += f"<tr{' class=best' if row[0] == best else ''}>{line}</tr>"
    style = style or ("many" if len(head) > MANY_COLUMNS else "")
    return f'<table class="{style}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
