"""The report's tables, as the command prints them and as the page shows them."""

from collections.abc import Mapping
from typing import Any

HEADERS = {
    "settings": "setting|ms/token|tokens/s|tokens/step (beta)|speedup (gamma)|median step ms|"
    "median first token ms|identical",
    "stages": "stage|median ms|p95 ms|mean ms|share",
    "depths": "depth|accepted|given the depth above",
    "passes": "nodes|median ms|p95 ms|against one node",
    "prompts": "prompt|prompt tokens|new tokens|plain ms/token|speculative ms/token|beta|speedup",
}
# The prompts' keys, in the order of their header; the first column is their number.
PROMPT_KEYS = "prompt_tokens new_tokens vanilla_ms_per_token speculative_ms_per_token beta speedup"
Table = list[list[str]]


def rows_by_setting(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the report's rows for plain decoding and every tree size, by their names in tables."""
    sizes = report["speculative"]["by_num_nodes"]
    return {"plain": {**report["vanilla"], "gamma": 1.0}, **{f"{size} nodes": sizes[size] for size in sizes}}


def tables(report: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of ``HEADERS`` by name, each with its header as the first row.

    Stages and depths are those of the best tree size.
    """
    best, passes = report["speculative"], report["verify_ms_by_tree_size"]
    stages = {**best["stages_ms"], "step": {**best["step_ms"], "share": 1.0}}
    settings = []
    for name, row in rows_by_setting(report).items():
        check, times = row.get("lossless"), (row["step_ms"]["p50"], row["prefill_ms"]["p50"])
        identical = f"{check['identical']}/{check['prompts']}" if check else "reference"
        settings.append(
            [
                name,
                row["ms_per_token"],
                f"{1000 / row['ms_per_token']:.1f}",
                row["beta"],
                row["gamma"],
                *times,
                identical,
            ]
        )
    rows: dict[str, list[list[Any]]] = {
        "settings": settings,
        "stages": [
            [name, row["p50"], row["p95"], row["mean"], f"{row['share']:.1%}"] for name, row in stages.items()
        ],
        "depths": [[row["depth"], row["accepted"], row["conditional"]] for row in best["acceptance_by_depth"]]
        or [["none", None, None]],
        "passes": [
            [size, row["p50"], row["p95"], row["p50"] / passes["1"]["p50"]] for size, row in passes.items()
        ],
        "prompts": [
            [row["prompt"] + 1, *(row[key] for key in PROMPT_KEYS.split())] for row in report["prompts"]
        ],
    }
    return {
        name: [header.split("|"), *([_cell(value) for value in row] for row in rows[name])]
        for name, header in HEADERS.items()
    }


def verdict(report: Mapping[str, Any]) -> str:
    """Return in words whether the draft head pays: the fastest tree size against plain decoding."""
    best = report["speculative"]
    gamma, size = best["gamma"], f"{best['num_nodes']} draft nodes"
    if gamma < 1:
        return (
            f"Slower than plain decoding: even the fastest tree size measured, {size}, takes {1 / gamma:.2f} "
            "times as long for a token. Decode this bundle with the method plain."
        )
    return f"{gamma:.2f} times as fast as plain decoding with {size}, the fastest tree size measured."


def format_report(report: Mapping[str, Any]) -> str:
    """Return the text that the command prints; a star marks the best tree size."""
    best, check, found = report["speculative"], report["lossless"], tables(report)
    for row in found["settings"]:
        row[0] += " *" if row[0] == f"{best['num_nodes']} nodes" else ""
    speedup = ", ".join(f"{name} {best['speedup_per_prompt'][name]:.2f}" for name in ("median", "p5", "p95"))
    return "\n".join(
        [
            *(
                _aligned(found[name])
                for name in ("settings", "stages", "depths", "passes")
                # Steps on a device have no passes of their own.
                if len(found[name]) > 1
            ),
            verdict(report),
            f"speedup per prompt   {speedup}",
            f"lossless             {check['identical']} of {check['prompts']} prompts identical, "
            f"{check['ties']} ties, {check['mismatches']} mismatches",
            f"machine              {report['machine']['cpu']}, {report['machine']['threads']} threads",
        ]
    )


def _cell(value: Any) -> str:
    """Format a number to three digits, and None as an empty cell."""
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def _aligned(table: Table) -> str:
    """Align the first column to the left and the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = []
    for name, *cells in table:
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, others, strict=True))
        lines.append(f"{name:<{first}}{numbers}\n")
    return "".join(lines)
