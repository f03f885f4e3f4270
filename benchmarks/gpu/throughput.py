"""Throughput: plain steps as a share of the memory's bandwidth, and tokens a second of many sequences."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.decoders import measure_steps, most_context, spread
from benchmarks.gpu.job import WINDOW, Job, contexts
from benchmarks.gpu.parts import Part, Skip, cell
from runtime.core.bundle import DRAFT, PLAIN, Bundle
from runtime.core.errors import DeviceError, UserError
from runtime.device.device import ITEM_SIZES

MB = 1e6
BANDWIDTH_HEADER = [
    "context", "step ms", "device ms", "weights MB", "cache MB", "whole cache MB", "GB/s",
    "share of bandwidth", "share, whole cache",
]  # fmt: skip
BATCHES_HEADER = [
    "sequences",
    "context",
    "plain tokens/s",
    "speculative tokens/s",
    "speedup",
    "tokens/step",
    "note",
]


def bandwidth(job: Job) -> Part:
    """Plain steps of one sequence at every context that the bundle takes.

    A step reads all weights and the cache of its context.
    """
    bundle, limit = job.bundle, job.facts.bandwidth
    weights = weight_bytes(bundle)
    rows: list[list[str]] = [BANDWIDTH_HEADER]
    data: list[dict[str, Any]] = []
    for length in tqdm(_lengths(job), desc="bandwidth", unit="context", leave=False):
        try:
            job.check_time()
            row = _plain_steps(job, length, weights)
        except Skip as skip:
            data.append({"context": length, "skipped": str(skip)})
            rows.append([str(length), str(skip), *[""] * (len(BANDWIDTH_HEADER) - 2)])
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


def _plain_steps(job: Job, length: int, weights: int) -> dict[str, Any]:
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


def batches(job: Job) -> Part:
    """Tokens a second by the number of sequences and the length of their contexts.

    Contexts are prompts strung together, so what follows them is drafted like other text, or better.
    """
    methods = [PLAIN, DRAFT] if job.has_head else [PLAIN]
    cells = [(batch, length) for batch in job.batches for length in job.contexts]
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    turns = [(method, *each) for method in methods for each in cells]
    for turn in tqdm(turns, desc="batches", unit="setting", leave=False):
        try:
            found[turn] = _batch(job, *turn)
        except Skip as skip:
            found[turn] = {"skipped": str(skip)}
        except (UserError, DeviceError) as error:
            # For example a lack of memory for these sequences. The next row begins with new decoders.
            found[turn] = {"failed": str(error)}
            job.decoders.close()
    rows: list[list[str]] = [BATCHES_HEADER]
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


def _batch(job: Job, method: str, batch: int, length: int) -> dict[str, Any]:
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
