"""Times of steps: by size of tree, by stage, of the host, against the memory, and of many sequences."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from benchmarks.gpu.decoders import Limits, Skip, TimedStep, measure_steps, most_context, spread
from benchmarks.gpu.job import TIME_IS_OVER, WINDOW, Job, contexts
from benchmarks.gpu.report import Part, cell
from runtime.core.bundle import DRAFT, PLAIN, Bundle
from runtime.core.errors import DeviceError, UserError
from runtime.device.device import ITEM_SIZES
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


def _steps(job: Job, method: str, nodes: int, limits: Limits, **options: bool) -> list[TimedStep]:
    """Steps of one sequence after the usual context. options: of ``measure_steps``"""
    decoder = job.decoders.get(method)
    return measure_steps(decoder, [job.usual_context()], nodes, limits, max_new_tokens=job.window, **options)


def tree_sizes(job: Job) -> Part:
    """Step times of every size of tree, captured and launched graph by graph."""
    context = len(job.usual_context())
    limits = Limits(max(1, job.limits.steps // ROUNDS), job.limits.seconds / ROUNDS)
    found: dict[tuple[str, str], list[TimedStep]] = {}
    turns = [(setting, mode) for _ in range(ROUNDS) for setting in job.settings for mode in MODES]
    # All turns of a method come together, for a device that has no memory for two decoders.
    turns.sort(key=lambda turn: turn[0][1] != PLAIN)
    for (name, method, nodes), mode in _in_time(job, turns, "tree sizes", "turn"):
        steps = _steps(job, method, nodes, limits, capture=MODES[mode])
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
        tables={f"One sequence, context from {context} tokens on; medians": rows},
        charts=[report_html.line(sizes, medians, x_title="draft nodes", y_title="ms a step, captured")],
        data={"rows": data, "context": context, "window": job.window},
    )


def stages(job: Job) -> Part:
    """Medians of the device's time by stage, from events between the stages.

    Stages are launched one by one, so their sum is not a captured step's time.
    """
    context = len(job.usual_context())
    rows: list[list[str]] = [["step", *ALL_STAGES, "all stages"]]
    data: list[dict[str, Any]] = []
    stacks: list[tuple[str, list[tuple[str, float]]]] = []
    for name, method, nodes in _in_time(job, job.settings, "stages", "setting"):
        steps = _steps(job, method, nodes, job.limits, stages=True)
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
        data={"rows": data, "context": context},
    )


def host_gap(job: Job) -> Part:
    """The host's time in a captured step, in which the device has nothing to do.

    The device's time is between an event before the launch and one after the work.
    """
    context = len(job.usual_context())
    rows: list[list[str]] = [HOST_GAP_HEADER]
    data: list[dict[str, Any]] = []
    for name, method, nodes in _in_time(job, job.settings, "host gap", "setting"):
        steps = _steps(job, method, nodes, job.limits, times_device=True)
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
        data={"rows": data, "context": context},
    )


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
