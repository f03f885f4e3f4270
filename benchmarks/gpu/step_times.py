"""How long a step takes: by the size of its tree, by stage, and how much of it is the host's work."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.decoders import Limits, TimedStep, measure_steps, spread
from benchmarks.gpu.job import TIME_IS_OVER, Job
from benchmarks.gpu.parts import Part, Skip, cell
from runtime.core.bundle import PLAIN
from runtime.engines.recorder import STAGES
from runtime.profiler import report_html

# Settings take turns, so that a device that grows warm and slow is so for all of them.
ROUNDS = 3
MODES = {"captured": True, "eager": False}
TREE_SIZES_HEADER = [
    "step",
    "captured ms",
    "p5 - p95",
    "eager ms",
    "p5 - p95",
    "eager/captured",
    "against plain",
    "steps",
]
# Bringing the results to the host, which only steps on a device have.
ALL_STAGES = (*STAGES, "read")
HOST_GAP_HEADER = ["step", "whole step ms", "device ms", "host ms", "p95", "of it the runner's", "share"]

Turn = TypeVar("Turn")


def _in_time(job: Job, turns: Sequence[Turn], what: str, unit: str) -> Iterator[Turn]:
    """The turns that begin before the time for the whole run is over, one at least."""
    for index, turn in enumerate(tqdm(turns, desc=what, unit=unit, leave=False)):
        if index and job.is_over:
            return
        yield turn


def _left_out(job: Job, rows: Sequence[dict[str, Any]]) -> str:
    """What a part says of the settings for which there was no time; empty if there was for all."""
    names = [name for name, _, _ in job.settings[len(rows) :]]
    return f"without {', '.join(names)}: {TIME_IS_OVER}" if names else ""


def tree_sizes(job: Job) -> Part:
    """Step times of every size of tree, captured and launched graph by graph."""
    prompt = job.usual_context()
    limits = Limits(max(1, job.limits.steps // ROUNDS), job.limits.seconds / ROUNDS)
    found: dict[tuple[str, str], list[TimedStep]] = {}
    turns = [(setting, mode) for _ in range(ROUNDS) for setting in job.settings for mode in MODES]
    # All turns of a method come together, for a device that has no memory for two decoders.
    turns.sort(key=lambda turn: turn[0][1] != PLAIN)
    for (name, method, nodes), mode in _in_time(job, turns, "tree sizes", "turn"):
        steps = measure_steps(
            job.decoders.get(method),
            [prompt],
            nodes,
            limits,
            max_new_tokens=job.window,
            capture=MODES[mode],
        )
        found.setdefault((name, mode), []).extend(steps)
    times = {key: spread(step.record.step_ms for step in steps) for key, steps in found.items()}
    rows: list[list[str]] = [TREE_SIZES_HEADER]
    data: list[dict[str, Any]] = []
    plain = times[PLAIN, "captured"]["p50"]
    for name, _, nodes in job.settings:
        if not {(name, mode) for mode in MODES} <= times.keys():
            break
        captured, eager = times[name, "captured"], times[name, "eager"]
        data.append({"step": name, "num_nodes": nodes, "captured_ms": captured, "eager_ms": eager})
        rows.append(
            [
                name,
                *(cell(captured["p50"]), f"{captured['p5']:.3f} - {captured['p95']:.3f}"),
                *(cell(eager["p50"]), f"{eager['p5']:.3f} - {eager['p95']:.3f}"),
                cell(eager["p50"] / captured["p50"], 2),
                cell(captured["p50"] / plain, 2),
                cell(captured["count"], 0),
            ]
        )
    if not data:
        raise Skip(TIME_IS_OVER)
    sizes = [float(row["num_nodes"]) for row in data]
    medians = [row["captured_ms"]["p50"] for row in data]
    return Part(
        reason=_left_out(job, data)
        or ("" if job.facts.is_gpu else "a CPU captures nothing, both columns are the same steps"),
        tables={f"One sequence, context from {len(prompt)} tokens on; medians": rows},
        charts=[report_html.line(sizes, medians, x_title="draft nodes", y_title="ms a step, captured")],
        data={"rows": data, "context": len(prompt), "window": job.window},
    )


def stages(job: Job) -> Part:
    """Medians of the device's time by stage, from events between the stages.

    Stages are launched one by one, so their sum is not a captured step's time.
    """
    prompt = job.usual_context()
    rows: list[list[str]] = [["step", *ALL_STAGES, "all stages"]]
    data: list[dict[str, Any]] = []
    stacks: list[tuple[str, list[tuple[str, float]]]] = []
    for name, method, nodes in _in_time(job, job.settings, "stages", "setting"):
        steps = measure_steps(
            job.decoders.get(method), [prompt], nodes, job.limits, max_new_tokens=job.window, stages=True
        )
        medians = {
            stage: float(np.median([step.record.stage_ms(stage) for step in steps])) for stage in ALL_STAGES
        }
        data.append({"step": name, "num_nodes": nodes, "stages_ms": medians, "steps": len(steps)})
        rows.append([name, *(cell(ms) for ms in medians.values()), cell(sum(medians.values()))])
        # The page has colours for the stages of a step on the host.
        stacks.append((name, [(s if s in STAGES else "other", ms) for s, ms in medians.items()]))
    legend = "".join(
        f'<span><i class="{stage if stage in STAGES else "other"}"></i>{stage}</span>' for stage in ALL_STAGES
    )
    return Part(
        reason=_left_out(job, data),
        tables={"Medians, ms": rows},
        charts=[report_html.stacked(stacks, x_title="ms by stage") + f'<div class="legend">{legend}</div>'],
        data={"rows": data, "context": len(prompt)},
    )


def host_gap(job: Job) -> Part:
    """The host's time in a captured step, in which the device has nothing to do.

    The device's time is between an event before the launch and one after the work.
    """
    prompt = job.usual_context()
    rows: list[list[str]] = [HOST_GAP_HEADER]
    data: list[dict[str, Any]] = []
    for name, method, nodes in _in_time(job, job.settings, "host gap", "setting"):
        steps = measure_steps(
            job.decoders.get(method),
            [prompt],
            nodes,
            job.limits,
            max_new_tokens=job.window,
            times_device=True,
        )
        whole = spread(step.wall_ms for step in steps)
        device = spread(step.record.stage_ms("device") for step in steps)
        host = spread(step.wall_ms - step.record.stage_ms("device") for step in steps)
        runner = spread(step.record.step_ms - step.record.stage_ms("device") for step in steps)
        row = {"step": name, "num_nodes": nodes, "whole_ms": whole, "device_ms": device}
        data.append({**row, "host_ms": host, "runner_ms": runner, "steps": len(steps)})
        numbers = [whole["p50"], device["p50"], host["p50"], host["p95"], runner["p50"]]
        rows.append([name, *(cell(ms) for ms in numbers), f"{host['p50'] / whole['p50']:.1%}"])
    return Part(
        reason=_left_out(job, data) or "the events themselves are part of what the host adds",
        tables={"Captured steps of one sequence; medians of the differences": rows},
        data={"rows": data, "context": len(prompt)},
    )
