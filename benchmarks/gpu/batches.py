"""Tokens a second by the number of sequences and the length of their contexts."""

from typing import Any

from tqdm import tqdm

from benchmarks.gpu.decoders import most_context
from benchmarks.gpu.job import WINDOW, Job
from benchmarks.gpu.parts import Part, Skip, cell
from benchmarks.gpu.prompts import contexts
from benchmarks.gpu.steps import measure_steps
from runtime.core.bundle import DRAFT, PLAIN
from runtime.core.errors import DeviceError, UserError

HEADER = ["sequences", "context", "plain tokens/s", "speculative tokens/s", "speedup", "tokens/step", "note"]


def measure(job: Job) -> Part:
    """Contexts are prompts strung together, so what follows them is drafted like other text, or better."""
    methods = [PLAIN, DRAFT] if job.has_head else [PLAIN]
    cells = [(batch, length) for batch in job.batches for length in job.contexts]
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    turns = [(method, *each) for method in methods for each in cells]
    for turn in tqdm(turns, desc="batches", unit="setting", leave=False):
        try:
            found[turn] = _measure(job, *turn)
        except Skip as skip:
            found[turn] = {"skipped": str(skip)}
        except (UserError, DeviceError) as error:
            # Such as memory that these sequences would need; the next row begins with new decoders.
            found[turn] = {"failed": str(error)}
            job.decoders.close()
    rows: list[list[str]] = [HEADER]
    data: list[dict[str, Any]] = []
    for batch, length in cells:
        plain, draft = (found.get((method, batch, length), {}) for method in (PLAIN, DRAFT))
        speeds = [each.get("tokens_per_second") for each in (plain, draft)]
        speedup = speeds[1] / speeds[0] if speeds[0] and speeds[1] else None
        notes = dict.fromkeys(
            each[key] for each in (plain, draft) for key in ("skipped", "failed") if key in each
        )
        data.append({"sequences": batch, "context": length, PLAIN: plain, DRAFT: draft, "speedup": speedup})
        per_step = draft.get("tokens_per_step")
        numbers = [cell(speeds[0], 1), cell(speeds[1], 1), cell(speedup, 2), cell(per_step, 2)]
        rows.append([str(batch), str(length), *numbers, "; ".join(notes)])
    return Part(
        tables={f"Decoding alone, greedy, {job.num_nodes} draft nodes": rows},
        data={"rows": data, "num_nodes": job.num_nodes},
    )


def _measure(job: Job, method: str, batch: int, length: int) -> dict[str, Any]:
    """Steps of ``batch`` sequences until the first of them ends, at ``length`` tokens or before."""
    job.check_time()
    if batch > job.decoders.max_num_seqs:
        raise Skip(f"the bundle takes {job.decoders.max_num_seqs} sequences at most")
    if length > job.decoders.max_length:
        raise Skip(f"the bundle takes {most_context(job.bundle)} tokens at most")
    window = min(WINDOW, length // 2)
    prompts = contexts(job.prompts, length - window, batch)
    nodes = job.num_nodes if method == DRAFT else 0
    # Reading long prompts again would take longer than the steps that it makes room for.
    steps = measure_steps(
        job.decoders.get(method), prompts, nodes, job.limits, max_new_tokens=window, is_repeated=False
    )
    seconds = sum(step.wall_ms for step in steps) / 1e3
    tokens = sum(step.num_tokens for step in steps)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / len(steps) / batch,
        "step_ms": 1e3 * seconds / len(steps),
        "steps": len(steps),
    }
