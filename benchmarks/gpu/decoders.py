"""The decoders that all parts share, since loading engines takes seconds. Their steps are timed here too."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.core.bundle import Bundle
from runtime.core.errors import DeviceError, RequestError
from runtime.decode.budget import FixedBudget
from runtime.decoder import GRAPH_STEP, SpeculativeDecoder
from runtime.device.device import CPU
from runtime.device.step import GraphStep
from runtime.engines.ort_wheel import check_installed
from runtime.engines.recorder import StageRecorder, StepRecord, recording
from runtime.load.device import open_device


class Skip(Exception):
    """Raised where a part of the report, or a row of one, has nothing to measure; the message says why."""


class Decoders:
    """A decoder for every method, loaded when it is first asked for.

    bundle: verified; all decoders run its graph steps on ``device``
    max_num_seqs, max_length: of every decoder
    """

    def __init__(
        self,
        bundle: Bundle,
        device: str,
        *,
        max_num_seqs: int,
        max_length: int,
        num_threads: int | None = None,
    ):
        self.bundle = bundle
        self.max_num_seqs, self.max_length = max_num_seqs, max_length
        self.device, self.num_threads = device, num_threads
        self._open: dict[str, SpeculativeDecoder] = {}

    def get(self, method: str) -> SpeculativeDecoder:
        """The decoder of a method. If the device lacks memory for two, the other one is closed."""
        if method not in self._open:
            try:
                self._open[method] = self._load(method)
            except DeviceError:
                if not self._open:
                    raise
                self.close()
                self._open[method] = self._load(method)
        return self._open[method]

    def close(self) -> None:
        """Free the memory of all decoders; they are loaded anew when they are asked for again."""
        while self._open:
            _, decoder = self._open.popitem()
            try:
                runner_of(decoder).close()
            except DeviceError:
                # This decoder had failed before, and its failure was reported then.
                continue

    def _load(self, method: str) -> SpeculativeDecoder:
        return SpeculativeDecoder.from_bundle(
            self.bundle.path,
            method=method,
            step=GRAPH_STEP,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            max_length=self.max_length,
            num_threads=self.num_threads,
            verify=False,
        )


def check_device(bundle: Bundle, device: str | None) -> str:
    """The device's name, by default what the bundle's target runs on, after opening and closing it.

    Raises RequestError for a name of no device or of one on which the target does not run, UserError if the
    target's library is missing, and DeviceError where this machine has no such device.
    """
    target, plan = bundle.manifest.target, bundle.manifest.engine_plan
    if device is None:
        device = "cuda:0" if bundle.manifest.is_for_gpu else CPU
    if plan and device == CPU:
        raise RequestError(
            f"--device: {bundle.path} holds engines of {target}, which run on a GPU, not on cpu"
        )
    if not bundle.manifest.is_for_gpu:
        check_installed()
    opened, _ = open_device(bundle, device, None)
    opened.close()
    return device


def most_context(bundle: Bundle) -> int:
    """Positions that a sequence of this bundle may have at most."""
    plan = bundle.manifest.engine_plan
    return plan.max_context if plan else bundle.manifest.model.max_position_embeddings


def runner_of(decoder: SpeculativeDecoder) -> GraphStep:
    """The decoder's runner, whose steps are graphs."""
    runner = decoder.batch.runner
    assert isinstance(runner, GraphStep), type(runner)
    return runner


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
