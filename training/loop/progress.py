"""The progress of a run: the line that an interruption ends with, and the bar over the training steps.

This module does not import torch, because the command needs it before torch is imported.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from training.config import TrainingConfig

if TYPE_CHECKING:
    import torch

# The line of an interruption before the first work that is kept.
BEFORE = "interrupted before training began; run the same command again"
# The share of the past in a smoothed loss, which follows a change within about 20 steps.
SMOOTHING = 0.95
# The time of a step is measured over this many steps, after the first step, in which libraries are loaded.
TIMED_STEPS = 2


class RunPhase:
    """The phase of a run, and the ``line`` that the command prints if it is interrupted there.

    The methods name the phase that begins; ``line`` stays right until the next call.
    """

    def __init__(self) -> None:
        self.line = BEFORE
        self._was_interrupted = False

    @contextmanager
    def heeding_interrupts(self) -> Iterator[None]:
        """A block in which Ctrl-C ends the run even if a library that is being imported swallows it.

        The run then ends at the next call of another method, or when the library fails that was imported in
        part. Nothing changes outside the main thread, and if the program has another handler for Ctrl-C or
        ignores it.
        """
        before = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        if before is not signal.default_int_handler or not is_main:
            yield
            return

        def interrupt(*_: Any) -> None:
            self._was_interrupted = True
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
            self.raise_if_interrupted()
        except Exception:
            self.raise_if_interrupted()
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def raise_if_interrupted(self) -> None:
        """Raises KeyboardInterrupt if an earlier one was swallowed."""
        if self._was_interrupted:
            raise KeyboardInterrupt

    def distilling(self, config: TrainingConfig) -> None:
        """The target model begins to continue prompts; every batch is kept."""
        self.raise_if_interrupted()
        self.line = (
            f"interrupted while distilling; what is finished is kept in {config.cache_directory}, run "
            "the same command again to go on"
        )

    def training(self, config: TrainingConfig, step: int, saved: int | None) -> None:
        """``step`` steps are done, and the last checkpoint is from step ``saved``; None if there is none."""
        self.raise_if_interrupted()
        if saved is None:
            self.line = (
                f"interrupted at step {step}, before the first checkpoint (--save-every "
                f"{config.save_every}); run the same command again to begin anew"
            )
        elif config.resume:
            self.line = f"interrupted at step {step}; run the same command again to go on from step {saved}"
        else:
            self.line = (
                f"interrupted at step {step}; run the same command with {_resuming(config)} to go on from "
                f"step {saved}"
            )

    def writing(self, config: TrainingConfig) -> None:
        """All steps are done, and the heads are evaluated and written."""
        self.line = (
            f"interrupted while the heads were evaluated; run the same command with {_resuming(config)} to "
            "evaluate and write them"
        )


def _resuming(config: TrainingConfig) -> str:
    """The flags with which the command continues a run."""
    return "--resume without --overwrite" if config.overwrite else "--resume"


class Meter:
    """A progress bar over the steps of a run, and a line about the time of a step.

    It is a context manager, so that a message after an interruption begins on a new line.

    state: the state of the run; ``step`` is the number of steps done, and the smoothed losses are kept as
        ``smoothed``
    """

    def __init__(self, config: TrainingConfig, state: dict[str, Any], *, visible: bool, device: torch.device):
        self._state = state
        self._device = device
        self._visible = visible
        self._num_steps = config.steps
        # The time left is estimated from the mean over all steps, so that an evaluation does not make it
        # jump.
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
        """Start the clock of a step. Time between steps, for instance of an evaluation, is not counted."""
        self._begun = time.perf_counter()

    def update(self, losses: list[float], num_tokens: int, learning_rate: float) -> None:
        """Show a step: the losses of the heads in nats a draft, and the number of tokens of its sequences."""
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
    """A time in hours and minutes. Example: 3725 -> "1 h 3 min"."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def peak_memory(device: torch.device) -> int:
    """The largest memory of this process so far in bytes, on the GPU or, without one, on the machine."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # The value is in KiB, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_words(num_bytes: int) -> str:
    """A size in GiB, or in whole MiB below 1 GiB. Example: 1610612736 -> "1.5 GiB"."""
    gib = num_bytes / 2**30
    return f"{gib:,.1f} GiB" if gib >= 1 else f"{math.ceil(num_bytes / 2**20)} MiB"
