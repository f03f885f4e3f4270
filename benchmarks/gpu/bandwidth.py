"""Plain steps against the memory's bandwidth: a step reads all weights and the cache of its context."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.job import WINDOW, Job
from benchmarks.gpu.parts import Part, Skip, cell
from benchmarks.gpu.prompts import contexts
from benchmarks.gpu.steps import measure_steps, spread
from runtime.core.bundle import PLAIN, Bundle
from runtime.device.device import ITEM_SIZES

MB = 1e6
HEADER = [
    "context", "step ms", "device ms", "weights MB", "cache MB", "whole cache MB", "GB/s",
    "share of bandwidth", "share, whole cache",
]  # fmt: skip


def measure(job: Job) -> Part:
    """Steps of one sequence at every context that the bundle takes."""
    bundle, limit = job.bundle, job.facts.bandwidth
    weights = weight_bytes(bundle)
    rows: list[list[str]] = [HEADER]
    data: list[dict[str, Any]] = []
    for length in tqdm(_lengths(job), desc="bandwidth", unit="context", leave=False):
        try:
            job.check_time()
            row = _row(job, length, weights)
        except Skip as skip:
            data.append({"context": length, "skipped": str(skip)})
            rows.append([str(length), str(skip), *[""] * (len(HEADER) - 2)])
            continue
        data.append(row)
        numbers = [cell(row[key]) for key in ("step_ms", "device_ms")]
        numbers += [cell(row[key] / MB, 1) for key in ("weight_bytes", "cache_bytes", "whole_cache_bytes")]
        numbers.append(cell(row["bytes_per_second"] / 1e9, 1))
        shares = [row["share"], row["share_whole_cache"]]
        rows.append([str(length), *numbers, *("-" if share is None else f"{share:.1%}" for share in shares)])
    if limit is None:
        reason = "shares are left out: the bandwidth of the device's memory is unknown"
        reason += "; --bandwidth gives it" if job.facts.is_gpu else ", because this is a CPU"
    else:
        reason = f"the memory moves {limit / 1e9:.0f} GB/s at most, by {job.facts.bandwidth_source}"
    return Part(
        reason=reason,
        tables={"Plain steps of one sequence, captured; medians": rows},
        data={"rows": data, "bandwidth": limit, "bandwidth_source": job.facts.bandwidth_source},
    )


def weight_bytes(bundle: Bundle) -> int:
    """Bytes of the target model's weights: of its plan, or of its files."""
    plan = bundle.manifest.engine_plan
    if plan and "weights" in plan.memory.get("backbone", {}):
        return plan.memory["backbone"]["weights"]
    files = bundle.manifest.files.items()
    return sum(record.size for name, record in files if name.startswith(("backbone.onnx", "backbone.engine")))


def cache_bytes_per_token(bundle: Bundle) -> int:
    """Bytes of keys and values that a token has in the target model's caches."""
    total = 0
    for tensor in bundle.manifest.graphs["backbone"].inputs:
        if tensor.name.startswith("past_"):
            _, heads, _, size = tensor.shape
            assert isinstance(heads, int)
            assert isinstance(size, int)
            total += heads * size * ITEM_SIZES[tensor.dtype]
    return total


def _fixed_capacity(bundle: Bundle) -> int | None:
    """Positions of a slot's cache, where the engines fix them."""
    shapes = (t.shape for t in bundle.manifest.graphs["backbone"].inputs if t.name.startswith("past_"))
    capacity = next(shapes)[2]
    return capacity if isinstance(capacity, int) else None


def _lengths(job: Job) -> Iterable[int]:
    """Tokens of the contexts at the end of their windows."""
    usual = min(job.decoders.max_length, len(job.usual_context()) + job.window)
    return sorted({usual, *(length for length in job.contexts if length <= job.decoders.max_length)})


def _row(job: Job, length: int, weights: int) -> dict[str, Any]:
    decoder = job.decoders.get(PLAIN)
    window = min(WINDOW, length // 2)
    if not window:
        raise Skip("a context of one token has no room for another")
    prompt = contexts(job.prompts, length - window, 1)[0]
    steps = measure_steps(decoder, [prompt], 0, job.limits, max_new_tokens=window)
    # Events change the step a little, so that the device's own time is measured on its own.
    timed = measure_steps(decoder, [prompt], 0, job.limits, max_new_tokens=window, times_device=True)
    step_ms = spread(step.record.step_ms for step in steps)["p50"]
    per_token = cache_bytes_per_token(job.bundle)
    # In the middle of the window that was measured.
    used = per_token * (len(prompt) + window // 2)
    whole = per_token * (_fixed_capacity(job.bundle) or decoder.max_length)
    speed = (weights + used) / (step_ms / 1e3)
    limit = job.facts.bandwidth
    return {
        "context": length,
        "step_ms": step_ms,
        "device_ms": spread(step.record.stage_ms("device") for step in timed)["p50"],
        "steps": len(steps),
        "weight_bytes": weights,
        "cache_bytes": used,
        "whole_cache_bytes": whole,
        "bytes_per_second": speed,
        "share": speed / limit if limit else None,
        "share_whole_cache": (weights + whole) / (step_ms / 1e3) / limit if limit else None,
    }
