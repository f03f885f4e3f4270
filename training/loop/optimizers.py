"""The optimizers of a run's heads, and their learning rates over the run."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from training.config import TrainingConfig
from training.head_set import HeadSet
from training.target_model import multiplies_bf16

BETAS = (0.9, 0.95)


def make_optimizers(heads: HeadSet, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon (Jordan et al., 2024) for the matrices inside the heads and AdamW for the rest.

    Every parameter group has its head's peak rate as ``peak``.
    """
    matrices, rest = [], []
    for settings, head in zip(config.heads, heads.drafters, strict=True):
        peak = {"peak": settings.learning_rate, "lr": settings.learning_rate}
        parameters = list(head.parameters())
        chosen = [p for p in parameters if p.ndim == 2 and min(p.shape) > 1 and config.optimizer == "muon"]
        ids = {id(parameter) for parameter in chosen}
        # A head of streams may have only matrices. A group without parameters could not be resumed.
        if chosen:
            matrices.append({"params": chosen, **peak})
        if len(chosen) < len(parameters):
            rest.append({"params": [p for p in parameters if id(p) not in ids], **peak})
    decay: dict[str, Any] = {"weight_decay": config.weight_decay}
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(torch.optim.AdamW(rest, betas=BETAS, **decay))
    if matrices:
        if multiplies_bf16():
            optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **decay))
        else:
            optimizers.append(Float32Muon(matrices, **decay))
    return optimizers


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], step: int, config: TrainingConfig) -> None:
    """Linear warm-up to each group's peak, then cosine to zero."""
    if step < config.warmup:
        share = (step + 1) / config.warmup
    else:
        progress = (step - config.warmup) / max(1, config.steps - config.warmup)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share


class Float32Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., 2024) with the orthogonal update computed in float32 instead of bfloat16.

    CPUs without instructions for bfloat16 need it. Settings, state and checkpoints are those of torch's Muon
    with ``adjust_lr_fn="match_rms_adamw"``.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, adjust_lr_fn="match_rms_adamw", **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            momentum, rate = group["momentum"], group["lr"]
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                average = state.setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                average.lerp_(matrix.grad, 1 - momentum)
                update = matrix.grad.lerp(average, momentum) if group["nesterov"] else average
                update = orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                matrix.mul_(1 - rate * group["weight_decay"])
                # The update gets the usual size of AdamW's updates (Moonlight, Liu et al., 2025, section
                # 2.2).
                matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix [M, N] with about the same singular vectors, and with singular values near 1.

    It is computed by ``steps`` of the Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X X^T
    (Jordan et al., 2024).
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
