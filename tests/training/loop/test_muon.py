"""Muon in float32 is torch's Muon, but for the rounding."""

import copy
from typing import Any

import pytest
import torch

from training.loop.optimizers import Float32Muon

SHAPES = ((24, 40), (40, 24), (16, 16))
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def matrices_after(optimizer_of: Any, num_steps: int = 4) -> list[torch.Tensor]:
    """Matrices after steps with random gradients, the same for every optimizer."""
    torch.manual_seed(0)
    matrices = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = optimizer_of(matrices)
    for _ in range(num_steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape)
        optimizer.step()
    return [matrix.detach() for matrix in matrices]


def torchs(matrices: list[torch.nn.Parameter]) -> torch.optim.Muon:
    return torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **SETTINGS)


def ours(matrices: list[torch.nn.Parameter]) -> Float32Muon:
    return Float32Muon(matrices, **SETTINGS)


def test_is_torchs_without_its_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = matrices_after(ours)
    rounded = matrices_after(torchs)
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone())
    for own, exact, near in zip(found, matrices_after(torchs), rounded, strict=True):
        torch.testing.assert_close(own, exact)
        assert 1e-4 < (near - exact).norm() / exact.norm() < 0.02


def test_a_checkpoint_of_torchs_is_continued() -> None:
    """Runs that began with torch's Muon go on."""
    matrix = torch.nn.Parameter(torch.randn(8, 12))
    first = torchs([matrix])
    matrix.grad = torch.randn(8, 12)
    first.step()
    second = ours([matrix])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    kept = second.state[matrix]["momentum_buffer"]
    assert torch.equal(kept, first.state[matrix]["momentum_buffer"])
    before = kept.clone()
    second.step()
    assert not torch.equal(second.state[matrix]["momentum_buffer"], before)
