"""Step time by the size of the tree, with capture on and off."""

from typing import Any

from tqdm import tqdm

from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import Part, cell
from benchmarks.gpu.steps import Limits, TimedStep, measure_steps, spread
from runtime.core.bundle import PLAIN
from runtime.profiler import svg

# Settings take turns, so that a device that grows warm and slow is so for all of them.
ROUNDS = 3
MODES = {"captured": True, "eager": False}
HEADER = [
    "step",
    "captured ms",
    "p5 - p95",
    "eager ms",
    "p5 - p95",
    "eager/captured",
    "against plain",
    "steps",
]


def measure(job: Job) -> Part:
    prompt = job.usual_context()
    limits = Limits(max(1, job.limits.steps // ROUNDS), job.limits.seconds / ROUNDS)
    found: dict[tuple[str, str], list[TimedStep]] = {}
    turns = [(setting, mode) for _ in range(ROUNDS) for setting in job.settings for mode in MODES]
    # All turns of a method come together, for a device that has no memory for two decoders.
    turns.sort(key=lambda turn: turn[0][1] != PLAIN)
    for (name, method, nodes), mode in tqdm(turns, desc="tree sizes", unit="turn", leave=False):
        job.check_time()
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
    rows: list[list[str]] = [HEADER]
    data: list[dict[str, Any]] = []
    plain = times[PLAIN, "captured"]["p50"]
    for name, _, nodes in job.settings:
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
    sizes = [float(row["num_nodes"]) for row in data]
    medians = [row["captured_ms"]["p50"] for row in data]
    return Part(
        reason="" if job.facts.is_gpu else "a CPU captures nothing, both columns are the same steps",
        tables={f"One sequence, context from {len(prompt)} tokens on; medians": rows},
        charts=[svg.line(sizes, medians, x_title="draft nodes", y_title="ms a step, captured")],
        data={"rows": data, "context": len(prompt), "window": job.window},
    )
