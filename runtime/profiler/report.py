"""What the profiler measured: the numbers of ``report.json``, its tables and the events of ``trace.json``.

All times in the report are milliseconds. Its keys "vanilla", "beta", "gamma" and "rows_per_step" stand for
plain decoding, the acceptance length (tokens per step), the speedup and the nodes verified per step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from runtime.core.bundle import PLAIN as PLAIN_METHOD
from runtime.engines.recorder import STAGES, StepRecord
from runtime.profiler.runs import PLAIN, Difference, Run

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


def median_ms_per_token(runs: Sequence[Run]) -> float:
    """The same, where a prompt's time is the median of its repeats, since other work may slow one down."""
    of_prompts: dict[int, list[Run]] = {}
    for run in runs:
        of_prompts.setdefault(run.prompt, []).append(run)
    ms = sum(float(np.median([run.decode_ms for run in repeats])) for repeats in of_prompts.values())
    return ms / sum(float(np.median([run.num_decoded for run in repeats])) for repeats in of_prompts.values())


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
        "ms_per_token": median_ms_per_token(runs),
        "beta": acceptance_length(runs),
        "num_steps": len(steps),
        "num_tokens": sum(run.num_decoded for run in runs),
        "prefill_ms": spread(run.prefill_ms for run in runs),
        "step_ms": spread(step.step_ms for step in steps),
        "stages_ms": stages,
        "host_share": sum(stages[stage]["share"] for stage in ("search", "accept", "commit", OTHER)),
        "rows_per_step": float(np.mean([step.num_nodes for step in steps])),
        "acceptance_by_depth": acceptance_by_depth([step.num_accepted for step in steps]),
    }


def by_prompt(plain: Sequence[Run], speculative: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one row a prompt; a prompt whose output ends with its first token has no speed."""
    rows = []
    for prompt in sorted({run.prompt for run in plain}):
        reference, drafted = ([run for run in runs if run.prompt == prompt] for runs in (plain, speculative))
        plain_ms, drafted_ms = (
            median_ms_per_token(runs) if any(run.num_steps for run in runs) else None
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


# The tables, as the command prints them and as the page shows them.
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
    """Return in words whether drafts pay: the fastest tree size against plain decoding."""
    best = report["speculative"]
    gamma, size = best["gamma"], f"{best['num_nodes']} draft nodes"
    if gamma < 1:
        has_head = report["settings"].get("method") != PLAIN_METHOD
        return (
            f"Slower than plain decoding: even the fastest tree size measured, {size}, takes {1 / gamma:.2f} "
            "times as long for a token. Decode this bundle "
            f"{'with the method plain' if has_head else 'without drafts of the text'}."
        )
    return f"{gamma:.2f} times as fast as plain decoding with {size}, the fastest tree size measured."


# A row in addition costs this share of a pass over one row at most where reading the weights takes the time.
CHEAP_ROW = 0.05
# From this share of a step on, the draft head or the host is worth a sentence.
LARGE_SHARE = 0.3


def explanation(report: Mapping[str, Any]) -> list[str]:
    """Say in words what bounds the fastest setting here, and what to change.

    Sentences about passes need their times (``verify_ms_by_tree_size``), which steps on a device lack.
    """
    best, passes = report["speculative"], report["verify_ms_by_tree_size"]
    shares = {name: stage["share"] for name, stage in best["stages_ms"].items()}
    found = [f"The target model's pass takes {shares['verify']:.0%} of a step"]
    widest = max(passes, key=int, default="1")
    if int(widest) > 1:
        times = passes[widest]["p50"] / passes["1"]["p50"]
        is_cheap = (times - 1) / (int(widest) - 1) <= CHEAP_ROW
        found[0] += f"; a pass over {widest} nodes takes {times:.2f} times as long as over one. "
        found[0] += (
            "It is bound by reading the weights: smaller ones (int8, int4) help, and more nodes cost little"
            if is_cheap
            else "It is bound by arithmetic, so every further node takes time"
        )
    found[0] += "."
    if shares["draft"] > LARGE_SHARE:
        found.append(
            f"The draft head takes {shares['draft']:.0%} of a step: fewer frames, a draft vocabulary or "
            "--drafter-precision int4 make it faster."
        )
    if best["host_share"] > LARGE_SHARE:
        found.append(
            f"The host takes {best['host_share']:.0%} of a step: the model is small for this machine, and "
            "fewer nodes or chains (--tree chain) leave the host less to do."
        )
    sizes = [int(size) for size in best["by_num_nodes"] if size.isdigit()]
    if len(sizes) > 1 and str(best["num_nodes"]).isdigit() and best["gamma"] > 1:
        size = int(best["num_nodes"])
        if size == max(sizes) or size == min(sizes) > 1:
            where, more = ("largest", "larger") if size == max(sizes) else ("smallest", "smaller")
            found.append(f"The fastest size is the {where} one measured; try {more} ones with --num-nodes.")
    return found


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
            " ".join([verdict(report), *explanation(report)]),
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


# The tracks of the trace, for https://ui.perfetto.dev.
SPECULATIVE_TRACK, PLAIN_TRACK = 1, 2
# More prompts make a trace slow to open.
MAX_PROMPTS = 16


def build_trace(runs: Sequence[Run], *, num_nodes: int | str) -> dict[str, Any]:
    """Return trace-event JSON of the plain runs and of the speculative runs with ``num_nodes``.

    Both tracks share one clock, so the interleaving shows. A request holds its prefill and its steps; on
    the speculative track a step holds its stages. Timestamps and durations are microseconds.
    """
    shown = [run for run in runs if run.prompt < MAX_PROMPTS and run.setting in (PLAIN, num_nodes)]
    origin = min((run.begin_ns for run in shown), default=0)
    events = [_label("process_name", 0, name="ctc-speculator")]
    for track, name in ((SPECULATIVE_TRACK, f"speculative, {num_nodes} nodes"), (PLAIN_TRACK, "plain")):
        events.append(_label("thread_name", track, name=name))
        events.append(_label("thread_sort_index", track, sort_index=track))
    for run in shown:
        events.extend(_run_events(run, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"max_prompts": MAX_PROMPTS}}


def _run_events(run: Run, origin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a run's events; a parent comes before its children, as viewers expect at equal timestamps."""
    track = PLAIN_TRACK if run.setting == PLAIN else SPECULATIVE_TRACK

    def span(name: str, begin_ns: int, end_ns: int, **args: int) -> dict[str, Any]:
        times = {"ts": (begin_ns - origin_ns) / 1e3, "dur": (end_ns - begin_ns) / 1e3}
        return {"name": name, "ph": "X", "pid": 1, "tid": track, **times, "args": args}

    yield span(f"prompt {run.prompt}", run.begin_ns, run.end_ns, new_tokens=len(run.token_ids))
    yield span("prefill", run.begin_ns, run.first_ns, prompt_tokens=run.num_prompt_tokens)
    for step in run.steps:
        yield span("step", step.begin_ns, step.end_ns, nodes=step.num_nodes, accepted=step.num_accepted)
        begin_ns = step.begin_ns
        for stage, end_ns in step.stages if track == SPECULATIVE_TRACK else ():
            yield span(stage, begin_ns, end_ns)
            begin_ns = end_ns


def _label(kind: str, track: int, **args: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": track, "args": args}
