"""The optimizers of a set of heads, and their learning rates over a run."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from training.config import TrainingConfig
from training.heads import HeadSet
from training.muon import Float32Muon
from training.number_formats import multiplies_bf16

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
        # A head of streams can have matrices alone, and a group without parameters could not be resumed.
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
