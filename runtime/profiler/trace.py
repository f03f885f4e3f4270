"""Runs as a Chrome trace, which https://ui.perfetto.dev opens: a track for each of the two methods."""

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.profiler.runs import VANILLA, Run

PROCESS_ID = 1
SPECULATIVE_TRACK, VANILLA_TRACK = 1, 2
# A trace is for looking at; more prompts only make it slow to open.
MAX_PROMPTS = 16


def build_trace(runs: Sequence[Run], *, num_nodes: int | str) -> dict[str, Any]:
    """Trace-event JSON of vanilla runs and of the speculative runs with ``num_nodes``.

    Both tracks share one clock, so the interleaving shows. On each: request > prefill, step > stages
    (stages on the speculative track only). Timestamps and durations are microseconds.
    """
    shown = [run for run in runs if run.prompt < MAX_PROMPTS and run.setting in (VANILLA, num_nodes)]
    origin = min((run.begin_ns for run in shown), default=0)
    events: list[dict[str, Any]] = [_name("process_name", 0, "ctc-speculator")]
    for track, name in ((SPECULATIVE_TRACK, f"speculative, {num_nodes} nodes"), (VANILLA_TRACK, "vanilla")):
        events.append(_name("thread_name", track, name))
        events.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": PROCESS_ID,
                "tid": track,
                "args": {"sort_index": track},
            }
        )
    for run in shown:
        events.extend(_run_events(run, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"max_prompts": MAX_PROMPTS}}


def _run_events(run: Run, origin: int) -> Iterator[dict[str, Any]]:
    """A parent's event comes before its children's, as viewers expect at equal timestamps."""
    track = VANILLA_TRACK if run.setting == VANILLA else SPECULATIVE_TRACK

    def span(name: str, begin: int, end: int, args: dict[str, int]) -> dict[str, Any]:
        return {
            "name": name,
            "ph": "X",
            "pid": PROCESS_ID,
            "tid": track,
            "ts": (begin - origin) / 1e3,
            "dur": (end - begin) / 1e3,
            "args": args,
        }

    yield span(f"prompt {run.prompt}", run.begin_ns, run.end_ns, {"new_tokens": len(run.token_ids)})
    yield span("prefill", run.begin_ns, run.first_ns, {"prompt_tokens": run.num_prompt_tokens})
    for begin, marks, end, num_rows, num_accepted in run.steps:
        yield span("step", begin, end, {"rows": num_rows, "accepted": num_accepted})
        if run.setting == VANILLA:
            continue
        previous = begin
        for stage, mark in marks:
            yield span(stage, previous, mark, {})
            previous = mark


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": PROCESS_ID, "tid": track, "args": {"name": name}}
