"""Weights as a checkpoint stores them: whole numbers or fp8 numbers, and one scale for each group of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A matrix [N, K] whose weights are codes times scales, without minima.

    codes: [N, K], int8, int16 or float8_e4m3fn
    scales: [N, K / group] float32; a scale is that of ``group`` consecutive codes of a row
    """

    codes: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """[N, K] float32: the products, rounded once."""
        rows, width = self.codes.shape
        groups = self.codes.float().reshape(rows, self.scales.shape[1], -1)
        return (groups * self.scales.unsqueeze(-1)).reshape(rows, width)


@dataclass(frozen=True)
class StoredTensor:
    """A quantised tensor of a checkpoint.

    kind: how messages name its form, such as Q8_0
    read: its codes, or its weights [N, K] in float32 if they are no codes times scales
    """

    kind: str
    read: Callable[[], Codes | Tensor]

    def dequantized(self) -> Tensor:
        """[N, K] float32."""
        found = self.read()
        return found.dequantized() if isinstance(found, Codes) else found


def unpack(words: Tensor, bits: int) -> Tensor:
    """The numbers in the last axis of ``words`` [..., W] int32, the lowest bits first: [..., W * 32 / bits].

    bits: a divisor of 32, at most 8. The numbers are int16 from 0 to 2 ** bits - 1.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(-2).to(torch.int16)
