"""What the host adds to a captured step: the time in which the device has nothing to do."""

from typing import Any

from tqdm import tqdm

from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import Part, cell
from benchmarks.gpu.steps import measure_steps, spread

HEADER = ["step", "whole step ms", "device ms", "host ms", "p95", "of it the runner's", "share"]


def measure(job: Job) -> Part:
    """The device's time is between an event before the launch and one after the work."""
    prompt = job.usual_context()
    rows: list[list[str]] = [HEADER]
    data: list[dict[str, Any]] = []
    for name, method, nodes in tqdm(job.settings, desc="host gap", unit="setting", leave=False):
        job.check_time()
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
        reason="the events themselves are part of what the host adds",
        tables={"Captured steps of one sequence; medians of the differences": rows},
        data={"rows": data, "context": len(prompt)},
    )
