"""A draft head's weights on disk: in float32, in float16, or with eight bits a weight.

With eight bits, a matrix is ``NAME`` [..., R, C] int8 and one scale for each of its rows, ``NAME.scale``
[..., R, 1] float16: half the size of float16, and rounded to 1/254 of a row's largest weight. Vectors are
float16. Numbers of tokens stay what they are.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.config import WEIGHTS_NAME as WEIGHTS_NAME

SCALE = ".scale"
LARGEST = 127


def save_weights(state: dict[str, Tensor], path: Path, dtype: torch.dtype) -> None:
    """Write weights; ``dtype`` of the matrices: float32, float16 or int8."""
    stored = {}
    for name, value in state.items():
        if not value.is_floating_point():
            stored[name] = value.contiguous()
        elif dtype == torch.int8 and value.ndim > 1:
            scale = (value.abs().amax(-1, keepdim=True) / LARGEST).half()
            # A row of zeros needs a scale that is not zero.
            scale = scale.clamp(min=torch.finfo(torch.float16).smallest_normal)
            rows = (value / scale.float()).round().clamp(-LARGEST, LARGEST)
            stored[name], stored[name + SCALE] = rows.to(torch.int8), scale
        else:
            stored[name] = value.to(torch.float16 if dtype == torch.int8 else dtype).contiguous()
    save_file(stored, path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights in float32, numbers of tokens in int64.

    Raises the errors of safetensors, and KeyError for a matrix without scales.
    """
    stored = load_file(path)
    rows = {name for name, value in stored.items() if value.dtype == torch.int8}
    scales = {name + SCALE for name in rows}
    weights = {}
    for name, value in stored.items():
        if name in rows:
            weights[name] = value.float() * stored[name + SCALE].float()
        elif name not in scales:
            weights[name] = value.float() if value.is_floating_point() else value
    return weights
