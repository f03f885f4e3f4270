"""How far a run has come, for the line that it ends with when it is interrupted."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from training.config import TrainingConfig

BEFORE = "interrupted before training began; run the same command again"


class Stage:
    """What Ctrl-C says: ``line`` is right at any time between two calls of the other methods."""

    def __init__(self) -> None:
        self.line = BEFORE
        self._was_interrupted = False

    @contextmanager
    def heeding_interrupts(self) -> Iterator[None]:
        """Within it, an interruption that a library swallows while it is imported ends the run nevertheless.

        It does so at the next call of another method, or if what was imported by half fails. Where Ctrl-C is
        ignored or handled otherwise, and outside of the main thread, nothing changes.
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
            self.check_interrupted()
        except Exception:
            self.check_interrupted()
            raise
        finally:
            signal.signal(signal.SIGINT, before)

    def check_interrupted(self) -> None:
        """Raises KeyboardInterrupt if there was one, which did not end the run."""
        if self._was_interrupted:
            raise KeyboardInterrupt

    def distilling(self, config: TrainingConfig) -> None:
        """The target model continues prompts, and every batch of them is kept."""
        self.check_interrupted()
        self.line = (
            f"interrupted while distilling; what is finished is kept in {config.cache_directory}, run "
            "the same command again to go on"
        )

    def training(self, config: TrainingConfig, step: int, saved: int | None) -> None:
        """``step`` steps are done, and the last checkpoint is of step ``saved``; None if there is none."""
        self.check_interrupted()
        if saved is None:
            self.line = (
                f"interrupted at step {step}, before the first checkpoint (--save-every "
                f"{config.save_every}); run the same command again to begin anew"
            )
        elif config.resume:
            self.line = f"interrupted at step {step}; run the same command again to go on from step {saved}"
        else:
            without = " without --overwrite" if config.overwrite else ""
            self.line = (
                f"interrupted at step {step}; run the same command with --resume{without} to go on from step "
                f"{saved}"
            )

    def writing(self, config: TrainingConfig) -> None:
        """All steps are done; the heads are evaluated and written."""
        self.line = (
            "interrupted while the heads were evaluated; run the same command with --resume to evaluate and "
            "write them"
        )
