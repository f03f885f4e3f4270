"""The report as one HTML page that needs nothing else: own SVG charts, every number in a table too."""

from collections.abc import Mapping
from html import escape
from typing import Any

from runtime.decoding.recorder import STAGES
from runtime.profiler import svg
from runtime.profiler.report import OTHER
from runtime.profiler.tables import Table, rows_by_setting, tables

STYLE = """
:root { color-scheme: light dark; --page: #f6f6f3; --card: #fff; --ink: #16161a; --soft: #5b5b63;
  --rule: #e3e3de; --main: #2a78d6; --good: #1a7f37; --bad: #c62828; --draft: #6a4fc4; --transform: #d98e04;
  --verify: #2a78d6; --accept: #17936a; --commit: #d6484a; --other: #97978f; }
@media (prefers-color-scheme: dark) { :root { --page: #111114; --card: #1b1b1f;
  --ink: #f1f1ee; --soft: #a5a5ad; --rule: #313137; --main: #4b93e6;
  --good: #4cc46c; --bad: #f06a6a; --draft: #9a86ea; --transform: #d39a2c;
  --verify: #4b93e6; --accept: #2bb489; --commit: #ea7072; --other: #7c7c78; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 32px 20px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 0 0 12px; color: var(--soft); }
.tiles, .cards { display: grid; gap: 16px; margin-top: 16px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); }
.cards { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); align-items: start; }
section, .tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px 18px; min-width: 0; overflow-x: auto; }
.tile b { display: block; font-size: 28px; line-height: 1.2; font-weight: 650; }
.tile span { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
table.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
table.facts td:first-child { white-space: nowrap; color: var(--soft); }
tr.best td { font-weight: 650; } tr:last-child td { border-bottom: 0; }
svg { width: 100%; height: auto; display: block; margin: 4px 0 10px; }
svg text { font-size: 12px; fill: var(--soft); text-anchor: middle; }
svg text.end { text-anchor: end; } svg text.start { text-anchor: start; } svg text.value { fill: var(--ink); }
svg .grid { stroke: var(--rule); } svg .mark, svg .dot { fill: var(--main); }
svg .line { fill: none; stroke: var(--main); stroke-width: 2.2; } svg .dot { stroke: var(--card); }
svg .even { stroke: var(--soft); stroke-dasharray: 2 4; }
svg .median { stroke: var(--ink); stroke-dasharray: 6 4; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
summary { cursor: pointer; color: var(--soft); }
""" + "".join(
    f".part.{stage} {{ fill: var(--{stage}); }} i.{stage} {{ background: var(--{stage}); }}\n"
    for stage in (*STAGES, OTHER)
)


def render(report: Mapping[str, Any]) -> str:
    """The page for the contents of ``report.json``."""
    bundle, settings, machine = report["bundle"], report["settings"], report["machine"]
    makers = (_sizes, _stages, _acceptance, _speedups, _verify, _facts)
    cards = "\n".join(make(report) for make in makers)
    title = escape(f"{bundle['model']} with a {bundle['drafter_type']} draft head")
    lead = (
        f"{settings['num_prompts']} prompts, {settings['max_new_tokens']} new tokens at most, "
        f"{machine['cpu']}, {machine['threads']} threads"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style></head>\n<body><main>\n"
        f"<h1>{title}</h1>\n<p>{escape(lead)}</p>\n{_tiles(report)}\n"
        f'<div class="cards">\n{cards}\n</div>\n</main></body>\n</html>\n'
    )


def _tiles(report: Mapping[str, Any]) -> str:
    best, check = report["speculative"], report["lossless"]
    state = "bad" if check["mismatches"] else "good"
    outputs = f"outputs identical; {check['ties']} ties, {check['mismatches']} mismatches"
    tiles = [
        ("", f"{best['gamma']:.2f}x", "speedup over plain decoding (gamma)"),
        ("", f"{best['beta']:.2f}", "tokens per verify step (beta)"),
        ("", f"{best['ms_per_token']:.2f} ms", f"per token with {best['num_nodes']} draft nodes"),
        ("", f"{report['vanilla']['ms_per_token']:.2f} ms", "per token in plain decoding"),
        (state, f"{check['identical']}/{check['prompts']}", outputs),
    ]
    body = "".join(
        f'<div class="tile"><b class="{style}">{value}</b><span>{escape(text)}</span></div>'
        for style, value, text in tiles
    )
    return f'<div class="tiles">{body}</div>'


def _sizes(report: Mapping[str, Any]) -> str:
    text = "Plain decoding and every tree size measured; the fastest is in bold and shown below."
    best = f"{report['speculative']['num_nodes']} nodes"
    return _card("Tree sizes", text, _table(tables(report)["settings"], best=best))


def _stages(report: Mapping[str, Any]) -> str:
    stacks = [
        (name, [(stage, values["mean"]) for stage, values in row["stages_ms"].items()])
        for name, row in rows_by_setting(report).items()
    ]
    legend = "".join(f'<span><i class="{stage}"></i>{stage}</span>' for stage in (*STAGES, OTHER))
    text = f"Mean step by stage, ms; the table is for {report['speculative']['num_nodes']} draft nodes."
    chart = svg.stacked(stacks, x_title="ms per step") + f'<div class="legend">{legend}</div>'
    return _card("Where a step goes", text, chart, _table(tables(report)["stages"]))


def _acceptance(report: Mapping[str, Any]) -> str:
    title = "Acceptance by depth"
    text = "Share of steps that accepted a draft at each depth of the tree."
    rows = report["speculative"]["acceptance_by_depth"]
    if not rows:
        return _card(title, text, "<p>No draft was accepted.</p>")
    chart = svg.bars(
        [row["accepted"] for row in rows],
        [str(row["depth"]) for row in rows],
        x_title="depth, tokens after the root",
        y_title="share of steps",
        top=1.0,
    )
    return _card(title, text, chart, _table(tables(report)["depths"]))


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
    table = f"<details><summary>All prompts</summary>{_table(tables(report)['prompts'])}</details>"
    return _card("Speedup per prompt", f"Over plain decoding, the dotted line: {quantiles}.", chart, table)


def _verify(report: Mapping[str, Any]) -> str:
    passes = report["verify_ms_by_tree_size"]
    length = report["settings"]["verify_prefix_length"]
    text = f"Median time of one pass of the target model by nodes (root and drafts), after {length} tokens."
    medians = [row["p50"] for row in passes.values()]
    chart = svg.line([int(n) for n in passes], medians, x_title="nodes in the pass", y_title="ms")
    return _card("Verify time by tree size", text, chart, _table(tables(report)["passes"]))


def _facts(report: Mapping[str, Any]) -> str:
    rows = [["", ""], ["command", report["command"]]]
    for group in ("bundle", "machine", "versions"):
        rows += [[f"{group}: {key}", str(value)] for key, value in report[group].items()]
    return _card("How it was measured", "", _table(rows, style="facts"))


def _card(title: str, text: str, *body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{''.join(body)}</section>"


def _table(table: Table, *, style: str = "", best: str | None = None) -> str:
    """best: the first cell of the row in bold."""
    head, *rows = table
    cells = "".join(f"<th>{escape(name)}</th>" for name in head if name)
    body = ""
    for row in rows:
        line = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f"<tr{' class=best' if row[0] == best else ''}>{line}</tr>"
    return f'<table class="{style}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
