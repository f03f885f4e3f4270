"""The frozen target model of a run: its number format, and the devices that hold it."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import get_max_memory
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from drafters.features import decoder_layers
from training.config import AUTO, MODEL_DTYPES, TrainingConfig
from training.errors import TrainingError
from training.setup import load_pretrained

HALVES = (torch.bfloat16, torch.float16)
OFFLOADED = "offload"


def model_dtype(config: TrainingConfig, base: Any, device: torch.device) -> torch.dtype:
    """The number format of the target model's weights.

    ``auto`` takes float32 on a CPU, which computes in it fastest, and on other devices bfloat16 for a model
    whose files have half precision. A head that is trained in fp32 and streams need the model in float32.
    """
    if config.model_dtype != AUTO:
        dtype: torch.dtype = getattr(torch, MODEL_DTYPES[config.model_dtype])
        return dtype
    exact = config.precision == "fp32" or config.has_streams
    return torch.float32 if device.type == "cpu" or exact or base.dtype not in HALVES else torch.bfloat16


def load_target_model(config: TrainingConfig, base: Any, device: torch.device, num_processes: int = 1) -> Any:
    """The frozen target model on ``device``, or spread as ``--device-map`` says. Raises TrainingError."""
    disable_progress_bar()  # it would share its line with what is said next
    load = functools.partial(
        load_pretrained, AutoModelForCausalLM, config.model, dtype=model_dtype(config, base, device)
    )
    if config.device_map is None:
        return load().to(device).eval().requires_grad_(False)
    if num_processes > 1:
        raise TrainingError(
            f"--device-map: expected one process, whose model it spreads over devices, got {num_processes}; "
            "several processes have a whole model each"
        )
    devices = _device_map(config, base, device)
    model = load(device_map=devices, offload_folder=str(config.run_directory / OFFLOADED)).eval()
    for name, module in _shared(model).items():
        if any(parameter.is_meta for parameter in module.parameters()):
            raise TrainingError(
                f"--device-map: {name} must be on a device, because the draft head shares it; got {devices}"
            )
    return model.requires_grad_(False)


def _device_map(config: TrainingConfig, base: Any, device: torch.device) -> dict[str, Any]:
    """Devices by module: those of a JSON file, or made by accelerate from the memory that is free.

    What the head shares is kept on ``device`` in any case.
    """
    if config.device_map != AUTO:
        return _read_device_map(str(config.device_map))
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(base, dtype=model_dtype(config, base, device))
    shared, memory = _shared(empty), get_max_memory()
    key: Any = "cpu" if device.type == "cpu" else device.index or 0
    size = sum(p.numel() * p.element_size() for module in shared.values() for p in module.parameters())
    memory[key] = max(0, memory[key] - size)
    layer = type(decoder_layers(empty)[0]).__name__
    found: dict[str, Any] = infer_auto_device_map(empty, memory, no_split_module_classes=[layer])
    if set(found) == {""}:
        return found
    return found | dict.fromkeys(_names(empty, list(shared.values())), key)


def _read_device_map(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"--device-map: must be {AUTO} or a JSON file; {path}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(place, str | int) for place in found.values()):
        raise TrainingError(f"--device-map: {path}: expected an object of devices by module")
    return found


def _shared(model: Any) -> dict[str, nn.Module]:
    """What a draft head reads of the model itself."""
    return {
        "the embedding": model.get_input_embeddings(),
        "the last norm": model.get_decoder().norm,
        "the LM head": model.lm_head,
    }


def _names(model: nn.Module, modules: list[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if any(module is found for found in modules)]
