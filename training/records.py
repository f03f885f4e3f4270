"""The evaluations during a run: their curves, their lines on the screen, and the best head so far."""

from typing import Any

from tqdm import tqdm

from drafters.base import Drafter
from training.finish import HeadWriter, HeldOut, best_directory, best_point, held_out_sequences

Curve = list[dict[str, float]]


class Records:
    """Evaluates all heads on the same held-out sequences every time.

    curves: of every head, to which evaluations are added: step, loss of the step, tokens per step (``beta``)
    heads: writes the best head so far
    writer: of TensorBoard, None for none
    """

    def __init__(self, curves: list[Curve], held_out: HeldOut, heads: HeadWriter, writer: Any):
        self._config = heads.config
        self._curves = curves
        self._held_out = held_out
        self._heads = heads
        self._writer = writer

    def evaluate(self, heads: list[Drafter], step: int, losses: list[float]) -> None:
        """Evaluate the heads after ``step`` steps, and keep those that are the best so far."""
        for settings, head, curve, loss in zip(self._config.heads, heads, self._curves, losses, strict=True):
            found = self._held_out.evaluate(head)
            beta = found.tokens_per_step
            curve.append({"step": step, "loss": round(loss, 4), "beta": round(beta, 3)})
            name = f" {settings.name}" if settings.name else ""
            tqdm.write(
                f"train: step {step}{name}: loss {loss:.3f} nats a draft, {beta:.3f} tokens per step on "
                f"{held_out_sequences(found.num_sequences)}"
            )
            if best_point(curve) is curve[-1]:
                self._heads.write(head, settings, best_directory(self._config, settings), curve, found)
            if self._writer:
                self._writer.add_scalar(f"{settings.name}/loss".lstrip("/"), loss, step)
                self._writer.add_scalar(f"{settings.name}/tokens_per_step".lstrip("/"), beta, step)
