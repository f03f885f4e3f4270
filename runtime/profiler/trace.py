"""Runs as a Chrome trace, which https://ui.perfetto.dev opens: a track for each of the two methods."""

from collections.abc import Iterator, Sequence
from typing import Any

from runtime.profiler.runs import PLAIN, Run

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
