"""The evaluations during a run: their curves, their lines on the screen, and the best head so far."""

from typing import Any

import torch
from tqdm import tqdm

from drafters.base import Drafter
from training.config import TrainingConfig
from training.finish import HeldOut, best_directory, best_point

Curve = list[dict[str, float]]


class Records:
    """Evaluates all heads on the same held-out sequences every time.

    curves: of every head, to which evaluations are added: step, loss of the step, tokens per step (``beta``)
    writer: of TensorBoard, None for none
    """

    def __init__(self, config: TrainingConfig, curves: list[Curve], held_out: HeldOut, writer: Any):
        self._config = config
        self._curves = curves
        self._held_out = held_out
        self._writer = writer

    def evaluate(self, heads: list[Drafter], step: int, losses: list[float]) -> None:
        """Evaluate the heads after ``step`` steps, and keep those that are the best so far."""
        for settings, head, curve, loss in zip(self._config.heads, heads, self._curves, losses, strict=True):
            beta = self._held_out.evaluate(head).tokens_per_step
            curve.append({"step": step, "loss": round(loss, 4), "beta": round(beta, 3)})
            name = f" {settings.name}" if settings.name else ""
            tqdm.write(
                f"train: step {step}{name}: loss {loss:.3f} nats a draft, {beta:.3f} tokens per step on "
                f"{self._held_out.num_evaluated} held-out sequences"
            )
            if best_point(curve) is curve[-1]:
                head.save_pretrained(best_directory(self._config, settings), dtype=torch.float32)
            if self._writer:
                self._writer.add_scalar(f"{settings.name}/loss".lstrip("/"), loss, step)
                self._writer.add_scalar(f"{settings.name}/tokens_per_step".lstrip("/"), beta, step)
