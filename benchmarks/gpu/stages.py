"""Where the device's time goes in a step, by events between its stages."""

from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.job import Job
from benchmarks.gpu.parts import Part, cell
from benchmarks.gpu.steps import measure_steps
from runtime.engines.recorder import STAGES
from runtime.profiler import svg

# Bringing the results to the host, which only steps on a device have.
ALL_STAGES = (*STAGES, "read")


def measure(job: Job) -> Part:
    """Medians of every stage. Stages are launched one by one, so their sum is not a captured step's time."""
    prompt = job.usual_context()
    rows: list[list[str]] = [["step", *ALL_STAGES, "all stages"]]
    data: list[dict[str, Any]] = []
    stacks: list[tuple[str, list[tuple[str, float]]]] = []
    for name, method, nodes in tqdm(job.settings, desc="stages", unit="setting", leave=False):
        job.check_time()
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
        tables={"Medians, ms": rows},
        charts=[svg.stacked(stacks, x_title="ms by stage") + f'<div class="legend">{legend}</div>'],
        data={"rows": data, "context": len(prompt)},
    )
