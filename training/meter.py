"""The progress bar of the training steps: smoothed losses, learning rate, tokens per second, time left."""

import math
import resource
import sys
import time
from typing import Any, Self

import torch
from tqdm import tqdm

from training.config import TrainingConfig
from training.memory import in_words

# The share of the past in a smoothed loss: it follows a change within about 20 steps.
SMOOTHING = 0.95
# After so many steps their time is told; the first one is left out, because libraries load in it.
TIMED_STEPS = 2


class Meter:
    """A progress bar over the steps of a run, and the line about their time.

    state: the run's, whose ``step`` has been done; the smoothed losses are kept in it as ``smoothed``
    Used with ``with``, so that a message after an interruption begins a line of its own.
    """

    def __init__(self, config: TrainingConfig, state: dict[str, Any], *, visible: bool, device: torch.device):
        self._state = state
        self._device = device
        self._visible = visible
        self._num_steps = config.steps
        # The time left follows from the mean of all steps, so that an evaluation does not make it jump.
        self._bar = tqdm(
            total=config.steps,
            initial=state["step"],
            disable=not visible,
            desc="training",
            unit="step",
            smoothing=0,
        )
        self._begun = time.perf_counter()
        self._seconds: list[float] = []
        self._num_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def begin_step(self) -> None:
        """A step begins; what happened since the last one, such as an evaluation, is not in its time."""
        self._begun = time.perf_counter()

    def update(self, losses: list[float], num_tokens: int, learning_rate: float) -> None:
        """A step is done: the losses of the heads in nats a draft, and the tokens of its sequences."""
        before = self._state.get("smoothed") or losses
        smoothed = [SMOOTHING * old + (1 - SMOOTHING) * new for old, new in zip(before, losses, strict=True)]
        self._state["smoothed"] = smoothed
        self._seconds.append(time.perf_counter() - self._begun)
        if len(self._seconds) > 1:
            self._num_tokens += num_tokens
        elapsed = sum(self._seconds[1:])
        rate = f", {self._num_tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        values = " ".join(f"{value:.3f}" for value in smoothed)
        self._bar.set_postfix_str(f"loss {values} nats a draft, lr {learning_rate:.2g}{rate}", False)
        self._bar.update()
        if len(self._seconds) == TIMED_STEPS + 1 and self._visible:
            self._tell_time(elapsed / TIMED_STEPS)

    def _tell_time(self, seconds: float) -> None:
        left = (self._num_steps - self._state["step"]) * seconds
        tqdm.write(
            f"train: about {seconds:.2g} s a step, so about {duration(left)} for the steps that are left, "
            f"without evaluations; so far at most {in_words(peak_memory(self._device))} of "
            f"{self._device.type} memory were in use"
        )


def duration(seconds: float) -> str:
    """Example: 3725 -> "1 h 3 min"."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def peak_memory(device: torch.device) -> int:
    """The most memory that this process had so far, in bytes: of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # In KiB, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
