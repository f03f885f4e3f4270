"""What the profiler measured, as a report: pure functions from runs to numbers, and a printed table.

All times in the report are milliseconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from runtime.engines.recorder import STAGES
from runtime.profiler.runs import VANILLA, Difference, Run, StepRecord

OTHER = "other"
# Two tokens whose logits are closer than this are a tie: shapes of a pass round differently.
TIE_TOLERANCE = 1e-4


def spread(values: Iterable[float]) -> dict[str, float]:
    """p50, p95 and mean. Example: [1, 3] -> p50 2.0, p95 2.9, mean 2.0."""
    array = np.fromiter(values, np.float64)
    p50, p95 = np.percentile(array, [50, 95])
    return {"p50": float(p50), "p95": float(p95), "mean": float(array.mean())}


def stage_durations(step: StepRecord) -> dict[str, float]:
    """Milliseconds in each stage of one step; ``other`` is what no stage covers."""
    begin, marks, end, _, _ = step
    durations = dict.fromkeys(STAGES, 0.0)
    previous = begin
    for stage, mark in marks:
        durations[stage] += (mark - previous) / 1e6
        previous = mark
    return {**durations, OTHER: (end - previous) / 1e6}


def acceptance_by_depth(num_accepted: Sequence[int]) -> list[dict[str, float]]:
    """How often a draft at each depth was accepted, down to the deepest acceptance seen.

    num_accepted: drafts accepted, one value a step.
    ``accepted`` is the share of all steps, ``conditional`` of those that accepted the depth above.
    Example: [0, 1, 2, 2] -> depth 1: 0.75, 0.75; depth 2: 0.5, 0.667.
    """
    rows = []
    above = len(num_accepted)
    for depth in range(1, max(num_accepted, default=0) + 1):
        count = sum(accepted >= depth for accepted in num_accepted)
        share = count / len(num_accepted)
        rows.append({"depth": depth, "accepted": share, "conditional": count / above})
        above = count
    return rows


def is_tie(gap: float | None) -> bool:
    """Whether the logits of the two tokens are too close to call; None is no tie."""
    return gap is not None and gap <= TIE_TOLERANCE


def lossless(num_prompts: int, differences: Sequence[tuple[Difference, float | None]]) -> dict[str, Any]:
    """Prompts with identical output, with ties only, and with a real mismatch, for one setting."""
    ties = {difference.prompt for difference, gap in differences if is_tie(gap)}
    mismatches = {difference.prompt for difference, gap in differences if not is_tie(gap)}
    return {
        "prompts": num_prompts,
        "identical": num_prompts - len(ties | mismatches),
        "ties": len(ties - mismatches),
        "mismatches": len(mismatches),
        "differences": [{**asdict(difference), "logit_gap": gap} for difference, gap in differences],
    }


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """All runs of one setting. ``ms_per_token`` leaves out the prefill and its token."""
    steps = [step for run in runs for step in run.steps]
    num_decoded = sum(run.num_decoded for run in runs)
    durations = [stage_durations(step) for step in steps]
    total = sum((step[2] - step[0]) / 1e6 for step in steps)
    stages = {}
    for stage in (*STAGES, OTHER):
        values = [duration[stage] for duration in durations]
        stages[stage] = {**spread(values), "share": sum(values) / total}
    host = ("transform", "accept", "commit", OTHER)
    return {
        "ms_per_token": sum(run.decode_ms for run in runs) / num_decoded,
        "beta": num_decoded / len(steps),
        "num_steps": len(steps),
        "num_tokens": num_decoded,
        "prefill_ms": spread(run.prefill_ms for run in runs),
        "step_ms": spread((step[2] - step[0]) / 1e6 for step in steps),
        "stages_ms": stages,
        "host_share": sum(stages[stage]["share"] for stage in host),
        "rows_per_step": float(np.mean([step[3] for step in steps])),
        "acceptance_by_depth": acceptance_by_depth([step[4] for step in steps]),
    }


def prompt_rows(vanilla: Sequence[Run], speculative: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a prompt; a prompt that ended with its first token has no speed."""
    rows = []
    for prompt in sorted({run.prompt for run in vanilla}):
        plain = [run for run in vanilla if run.prompt == prompt]
        drafted = [run for run in speculative if run.prompt == prompt]
        row: dict[str, Any] = {
            "prompt": prompt,
            "prompt_tokens": plain[0].num_prompt_tokens,
            "new_tokens": len(plain[0].token_ids),
            "vanilla_ms_per_token": _per_token(plain),
            "speculative_ms_per_token": _per_token(drafted),
        }
        num_steps = sum(len(run.steps) for run in drafted)
        row["beta"] = sum(run.num_decoded for run in drafted) / num_steps if num_steps else None
        both = row["vanilla_ms_per_token"] and row["speculative_ms_per_token"]
        row["speedup"] = row["vanilla_ms_per_token"] / row["speculative_ms_per_token"] if both else None
        rows.append(row)
    return rows


def _per_token(runs: Sequence[Run]) -> float | None:
    num_decoded = sum(run.num_decoded for run in runs)
    return sum(run.decode_ms for run in runs) / num_decoded if num_decoded else None


def build_report(
    runs: Sequence[Run],
    differences: Sequence[tuple[Difference, float | None]],
    *,
    verify_ms: Mapping[int, Sequence[float]],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """The contents of ``report.json``.

    differences: from ``find_differences``, each with its logit gap
    verify_ms: repeated timings of one verify pass, by rows in the pass
    context: what describes the measurement (bundle, settings, machine, versions), copied as it is
    """
    by_setting: dict[int | str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    num_prompts = len({run.prompt for run in runs})
    vanilla = summarise(by_setting[VANILLA])
    sizes = {}
    # Numbers in order, then "auto".
    for setting in sorted(set(by_setting) - {VANILLA}, key=lambda one: (isinstance(one, str), one)):
        summary = summarise(by_setting[setting])
        summary["gamma"] = vanilla["ms_per_token"] / summary["ms_per_token"]
        own = [(difference, gap) for difference, gap in differences if difference.setting == setting]
        summary["lossless"] = lossless(num_prompts, own)
        sizes[setting] = summary
    best = min(sizes, key=lambda setting: sizes[setting]["ms_per_token"])
    rows = prompt_rows(by_setting[VANILLA], by_setting[best])
    speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
    p5, median, p95 = (float(value) for value in np.percentile(speedups, [5, 50, 95]))
    speculative = {key: value for key, value in sizes[best].items() if key != "lossless"}
    return {
        **context,
        "vanilla": vanilla,
        "speculative": {
            "num_nodes": best,
            **speculative,
            "speedup_per_prompt": {"p5": p5, "median": median, "p95": p95},
            "by_num_nodes": {str(setting): summary for setting, summary in sizes.items()},
        },
        "lossless": sizes[best]["lossless"],
        "verify_ms_by_tree_size": {str(rows): spread(values) for rows, values in verify_ms.items()},
        "prompts": rows,
    }


def format_table(report: Mapping[str, Any]) -> str:
    """The report as the text that the command prints."""
    vanilla, best = report["vanilla"], report["speculative"]
    lines = [f"{'setting':<12}{'ms/token':>10}{'beta':>8}{'gamma':>8}{'step ms':>10}{'first token ms':>16}"]

    def setting_line(name: str, row: Mapping[str, Any], gamma: float) -> str:
        times = f"{row['step_ms']['p50']:>10.2f}{row['prefill_ms']['p50']:>16.1f}"
        return f"{name:<12}{row['ms_per_token']:>10.3f}{row['beta']:>8.2f}{gamma:>8.2f}{times}"

    lines.append(setting_line("vanilla", vanilla, 1.0))
    for size, row in best["by_num_nodes"].items():
        mark = " *" if size == str(best["num_nodes"]) else ""
        lines.append(setting_line(f"{size} nodes{mark}", row, row["gamma"]))
    lines += ["", f"{'stage *':<12}{'p50 ms':>10}{'p95 ms':>10}{'share':>8}"]
    for stage, row in best["stages_ms"].items():
        lines.append(f"{stage:<12}{row['p50']:>10.3f}{row['p95']:>10.3f}{row['share']:>8.1%}")
    depths = "  ".join(f"{row['depth']}: {row['accepted']:.2f}" for row in best["acceptance_by_depth"])
    passes = "  ".join(f"{size}: {row['p50']:.2f}" for size, row in report["verify_ms_by_tree_size"].items())
    speedup, check = best["speedup_per_prompt"], report["lossless"]
    lines += [
        "",
        f"accepted at depth    {depths or 'nothing was accepted'}",
        f"verify ms by rows    {passes}",
        f"speedup per prompt   median {speedup['median']:.2f}, "
        f"p5 {speedup['p5']:.2f}, p95 {speedup['p95']:.2f}",
        f"lossless             {check['identical']} of {check['prompts']} prompts identical, "
        f"{check['ties']} ties, {check['mismatches']} mismatches",
        f"machine              {report['machine']['cpu']}, {report['machine']['threads']} threads",
    ]
    return "\n".join(lines)
