"""Weights as a checkpoint stores them: whole numbers or fp8 numbers, and one scale for each group of them."""

from collections.abc import Callable
from dataclasses import dataclass

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
