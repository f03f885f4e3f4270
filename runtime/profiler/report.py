"""What the profiler measured, as a report: pure functions from runs to numbers.

All times in the report are milliseconds. Its keys "vanilla", "beta", "gamma" and "rows_per_step" stand for
plain decoding, the acceptance length (tokens per step), the speedup and the nodes verified per step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from runtime.engines.recorder import STAGES, StepRecord
from runtime.profiler.differences import Difference
from runtime.profiler.runs import PLAIN, Run

OTHER = "other"
# The report's names for two fields of ``Difference``.
REPORT_KEYS = {"plain_token": "vanilla_token", "token": "speculative_token"}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return p50, p95 and mean. Example: [1, 3] -> p50 2.0, p95 2.9, mean 2.0."""
    array = np.fromiter(values, np.float64)
    p50, p95 = np.percentile(array, [50, 95])
    return {"p50": float(p50), "p95": float(p95), "mean": float(array.mean())}


def stage_durations(step: StepRecord) -> dict[str, float]:
    """Return milliseconds in each stage of one step; ``other`` is what no stage covers."""
    durations = {stage: step.stage_ms(stage) for stage in STAGES}
    return {**durations, OTHER: step.step_ms - sum(durations.values())}


def acceptance_by_depth(num_accepted: Sequence[int]) -> list[dict[str, float]]:
    """Return how often a draft at each depth was accepted, down to the deepest acceptance seen.

    num_accepted: drafts accepted, one value a step
    ``accepted`` is the share of all steps, ``conditional`` of those that accepted the depth above.
    Example: [0, 1, 2, 2] -> depth 1: 0.75, 0.75; depth 2: 0.5, 0.667.
    """
    rows = []
    above = len(num_accepted)
    for depth in range(1, max(num_accepted, default=0) + 1):
        count = sum(accepted >= depth for accepted in num_accepted)
        rows.append({"depth": depth, "accepted": count / len(num_accepted), "conditional": count / above})
        above = count
    return rows


def lossless(num_prompts: int, differences: Sequence[Difference]) -> dict[str, Any]:
    """Count a setting's prompts with identical output, with ties only, and with a real mismatch."""
    ties = {difference.prompt for difference in differences if difference.is_tie}
    mismatches = {difference.prompt for difference in differences if not difference.is_tie}
    return {
        "prompts": num_prompts,
        "identical": num_prompts - len(ties | mismatches),
        "ties": len(ties - mismatches),
        "mismatches": len(mismatches),
        "differences": [
            {REPORT_KEYS.get(key, key): value for key, value in asdict(difference).items()}
            for difference in differences
        ],
    }


class Decoded(Protocol):
    """The times and counts of a ``Run``, or of what the benchmarks keep of one."""

    @property
    def decode_ms(self) -> float: ...
    @property
    def num_decoded(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


def ms_per_token(runs: Sequence[Decoded]) -> float:
    """Return the decode time per token; the prefill and its token are left out. Some run must have a step."""
    return sum(run.decode_ms for run in runs) / sum(run.num_decoded for run in runs)


def acceptance_length(runs: Sequence[Decoded]) -> float:
    """Return tokens per verify step. Example: 7 tokens in 2 steps and 8 in 4 -> (6 + 7) / (2 + 4)."""
    return sum(run.num_decoded for run in runs) / sum(run.num_steps for run in runs)


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """Summarise all runs of one setting, at least one of which has a step."""
    steps = [step for run in runs for step in run.steps]
    durations = [stage_durations(step) for step in steps]
    total = sum(step.step_ms for step in steps)
    stages = {}
    for stage in (*STAGES, OTHER):
        values = [duration[stage] for duration in durations]
        stages[stage] = {**spread(values), "share": sum(values) / total}
    return {
        "ms_per_token": ms_per_token(runs),
        "beta": acceptance_length(runs),
        "num_steps": len(steps),
        "num_tokens": sum(run.num_decoded for run in runs),
        "prefill_ms": spread(run.prefill_ms for run in runs),
        "step_ms": spread(step.step_ms for step in steps),
        "stages_ms": stages,
        "host_share": sum(stages[stage]["share"] for stage in ("transform", "accept", "commit", OTHER)),
        "rows_per_step": float(np.mean([step.num_nodes for step in steps])),
        "acceptance_by_depth": acceptance_by_depth([step.num_accepted for step in steps]),
    }


def by_prompt(plain: Sequence[Run], speculative: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row a prompt; a prompt whose output ends with its first token has no speed."""
    rows = []
    for prompt in sorted({run.prompt for run in plain}):
        reference, drafted = ([run for run in runs if run.prompt == prompt] for runs in (plain, speculative))
        plain_ms, drafted_ms = (
            ms_per_token(runs) if any(run.num_steps for run in runs) else None
            for runs in (reference, drafted)
        )
        rows.append(
            {
                "prompt": prompt,
                "prompt_tokens": reference[0].num_prompt_tokens,
                "new_tokens": len(reference[0].token_ids),
                "vanilla_ms_per_token": plain_ms,
                "speculative_ms_per_token": drafted_ms,
                "beta": acceptance_length(drafted) if drafted_ms else None,
                "speedup": plain_ms / drafted_ms if plain_ms and drafted_ms else None,
            }
        )
    return rows


def build_report(
    runs: Sequence[Run],
    differences: Sequence[Difference],
    *,
    verify_ms: Mapping[int, Sequence[float]],
    context: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of ``report.json``; settings stand in the order of their first runs.

    differences: with their logit gaps
    verify_ms: repeated timings of one verify pass, by nodes in the pass
    context: what describes the measurement (bundle, settings, machine, versions), copied as it is
    """
    by_setting: dict[int | str, list[Run]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    plain_runs = by_setting.pop(PLAIN)
    plain = summarise(plain_runs)
    num_prompts = len({run.prompt for run in plain_runs})
    sizes = {}
    for setting, own_runs in by_setting.items():
        summary = summarise(own_runs)
        summary["gamma"] = plain["ms_per_token"] / summary["ms_per_token"]
        own = [difference for difference in differences if difference.setting == setting]
        summary["lossless"] = lossless(num_prompts, own)
        sizes[setting] = summary
    best = min(sizes, key=lambda setting: sizes[setting]["ms_per_token"])
    rows = by_prompt(plain_runs, by_setting[best])
    speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
    percentiles = np.percentile(speedups, [5, 50, 95])
    speculative = {key: value for key, value in sizes[best].items() if key != "lossless"}
    return {
        **context,
        "vanilla": plain,
        "speculative": {
            "num_nodes": best,
            **speculative,
            "speedup_per_prompt": dict(zip(("p5", "median", "p95"), percentiles.tolist(), strict=True)),
            "by_num_nodes": {str(setting): summary for setting, summary in sizes.items()},
        },
        "lossless": sizes[best]["lossless"],
        "verify_ms_by_tree_size": {str(nodes): spread(values) for nodes, values in verify_ms.items()},
        "prompts": rows,
    }
