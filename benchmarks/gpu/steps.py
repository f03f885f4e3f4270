"""Many steps of one kind, timed."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.gpu.decoders import runner_of
from benchmarks.gpu.parts import Skip
from runtime.decode.budget import FixedBudget
from runtime.decoder import SpeculativeDecoder
from runtime.engines.recorder import StageRecorder, StepRecord, recording

# Steps that are left out of a measurement: the first runs eagerly, and the second is captured.
WARMUP_STEPS = 3
# Few steps say little, so these are taken however long they last.
LEAST_STEPS = 5


@dataclass(frozen=True)
class Limits:
    """Limits of one measurement: the number of steps, and the seconds after which fewer are enough."""

    steps: int = 100
    seconds: float = 3.0


@dataclass(frozen=True)
class TimedStep:
    """A step as the device's runner recorded it.

    wall_ms: the same with all that the host does for it: text, stop tokens, budget
    num_tokens: handed out, of all sequences together
    """

    record: StepRecord
    wall_ms: float
    num_tokens: int


def measure_steps(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Sequence[int]],
    num_nodes: int,
    limits: Limits,
    *,
    max_new_tokens: int,
    capture: bool = True,
    stages: bool = False,
    times_device: bool = False,
    is_repeated: bool = True,
) -> list[TimedStep]:
    """Steps of as many sequences as there are prompts, after a warm-up.

    max_new_tokens: of a sequence; where one has ended, all begin again with their prompts
    capture, times_device: of the ``GraphStep``; stages: whether stages are recorded, one by one
    is_repeated: whether all begin again until there are enough steps
    """
    batch, runner, budget = decoder.batch, runner_of(decoder), FixedBudget(num_nodes)
    before = runner.capture, runner.times_device
    found: list[TimedStep] = []
    runner.capture, runner.times_device = capture, times_device
    try:
        warm, seconds = 0, 0.0
        while True:
            batch.clear()
            for prompt in prompts:
                batch.enter(decoder.new_sequence(prompt, max_new_tokens=max_new_tokens, stop_token_ids=()))
            if len(batch.sequences) < len(prompts):
                raise Skip("the context leaves no room for a step")
            with recording(runner, StageRecorder(wants_stages=stages)) as recorder:
                while len(batch.sequences) == len(prompts):
                    began = time.perf_counter()
                    chunks = batch.step(budget)
                    wall = time.perf_counter() - began
                    if warm < WARMUP_STEPS:
                        warm += 1
                        continue
                    seconds += wall
                    count = sum(len(chunk.token_ids) for _, chunk in chunks)
                    found.append(TimedStep(recorder.steps[-1], 1e3 * wall, count))
                    is_late = seconds >= limits.seconds and len(found) >= LEAST_STEPS
                    if len(found) >= limits.steps or is_late:
                        return found
            if found and not is_repeated:
                return found
    finally:
        batch.clear()
        runner.capture, runner.times_device = before


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile, and how many values there are."""
    array = np.fromiter(values, np.float64)
    p5, p50, p95 = np.percentile(array, [5, 50, 95]).tolist()
    return {"p50": p50, "p5": p5, "p95": p95, "count": float(array.size)}
