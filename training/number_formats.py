"""The number formats of a run, chosen for its device."""

import dataclasses
from typing import Any

import torch

from training.config import AUTO, TrainingConfig

# Names of torch.cpu.get_capabilities: x86 with AVX-512 or AMX, and ARM.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")


def multiplies_bf16() -> bool:
    """Whether the run's device has instructions for products in bfloat16.

    Every GPU is taken to have them. A CPU without them multiplied bfloat16 5 to 40 times slower than float32.
    """
    capabilities = torch.cpu.get_capabilities()
    return torch.cuda.is_available() or any(capabilities.get(name, False) for name in BF16_INSTRUCTIONS)


def with_number_formats(config: TrainingConfig, base: Any) -> TrainingConfig:
    """The configuration with number formats in place of ``auto``.

    base: the target model's configuration
    Products are in bf16 if the device has instructions for it. On a GPU, a model that is stored in 16 bits is
    loaded in bf16 if products are in bf16, because its weights would be rounded in them anyway, and it takes
    half the memory.
    """
    if config.precision == AUTO:
        config = dataclasses.replace(config, precision="bf16" if multiplies_bf16() else "fp32")
    if config.model_dtype == AUTO:
        stored_in_half = getattr(base, "dtype", None) in (torch.bfloat16, torch.float16)
        half = torch.cuda.is_available() and stored_in_half and config.precision == "bf16"
        half = half and not config.has_streams  # which are trained in float32 layers of the model
        config = dataclasses.replace(config, model_dtype="bf16" if half else "fp32")
    return config
