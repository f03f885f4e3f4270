"""Muon in float32, for CPUs without instructions for bfloat16."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Float32Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., 2024), which makes updates orthogonal in float32 instead of bfloat16.

    Settings, state and checkpoints are those of torch's Muon with ``adjust_lr_fn="match_rms_adamw"``.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, adjust_lr_fn="match_rms_adamw", **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
                # Moonlight (Liu et al., 2025), section 2.2: the size that updates of AdamW usually have.
                matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))
        return loss


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix [M, N] of about the same singular vectors and singular values near 1.

    ``steps`` of the Newton-Schulz iteration X <- a X + (b A + c A A) X with A = X X^T (Jordan et al., 2024).
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
