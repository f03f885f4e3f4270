"""The frozen target model of a run: its number format, its devices, and what heads share with it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from drafters.base import Drafter
from drafters.base_model import stored_weights_digest
from drafters.target_models import (
    TargetModelError,
    check_target_model,
    last_layer_logits,
    output_norm_weight,
    weights_digest,
)
from training.config import MODEL_DTYPES, TrainingConfig
from training.errors import TrainingError

OFFLOADED = "offloaded"


def read_model_config(config: TrainingConfig) -> Any:
    """The target model's configuration, checked as the export checks it. Raises TrainingError."""
    base = load_pretrained(AutoConfig, config.model)
    try:
        check_target_model(base)
    except TargetModelError as error:
        raise TrainingError(f"--model: {error}") from error
    return base


def load_target_model(config: TrainingConfig, device: torch.device) -> Any:
    """The frozen target model on ``device``, or spread by ``--device-map``. Raises TrainingError."""
    disable_progress_bar()  # it would share its line with what is said next
    options: dict[str, Any] = {"dtype": getattr(torch, MODEL_DTYPES[config.model_dtype])}
    if config.device_map:
        options |= {"device_map": config.device_map, "offload_folder": config.cache_directory / OFFLOADED}
    model = load_pretrained(AutoModelForCausalLM, config.model, **options)
    if not config.device_map:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def target_digest(model: Any, directory: Path) -> str:
    """The digest of a target model's weights that the export computes, which loads them in float32."""
    in_memory = model.dtype == torch.float32 and getattr(model, "hf_device_map", None) is None
    return weights_digest(model) if in_memory else stored_weights_digest(directory)


def teacher(model: Any) -> Callable[[Tensor], Tensor]:
    """A function from the output of the target model's last layer [..., H] to its logits [..., V].

    The logits are on the device of what is given, wherever the model's parts are.
    """

    def logits(hidden: Tensor) -> Tensor:
        return last_layer_logits(model, hidden.to(model.dtype)).to(hidden.device)

    return logits


@dataclass(frozen=True)
class SharedTables:
    """What the heads of a run share with the target model.

    embed_tokens, lm_head: [V, H] each; norm_weight [H], of ``output_norm_weight``
    """

    embed_tokens: Tensor
    lm_head: Tensor
    norm_weight: Tensor

    @classmethod
    def of(cls, model: Any, precision: str, device: torch.device) -> "SharedTables":
        """The model's own tensors where they can be used as they are, else copies on ``device``.

        Without autocast (``precision`` fp32) products need tables in float32.
        """
        dtype = model.dtype if precision == "bf16" else torch.float32
        embed, head = (_weight(part) for part in (model.get_input_embeddings(), model.lm_head))
        tied = embed.data_ptr() == head.data_ptr()
        embed = embed.to(device, dtype)
        head = embed if tied else head.to(device, dtype)
        with align_module_device(model.get_decoder().norm):
            return cls(embed, head, output_norm_weight(model).detach().clone())

    def attach(self, head: Drafter, model: Any) -> None:
        """Give a fresh head what it shares with the target model."""
        if head.config.trunk_type.borrows_layers:
            head.attach_model(model)
        else:
            head.attach_base(self.embed_tokens, self.lm_head)
        head.start_from(self.norm_weight)


def _weight(module: Any) -> Tensor:
    """The weight of a module, also of one that accelerate keeps in memory or on disk until it runs."""
    with align_module_device(module):
        weight: Tensor = module.weight.detach()
        return weight


def load_pretrained(kind: Any, directory: Path, **options: Any) -> Any:
    """What a class of Transformers makes of a model directory. Raises TrainingError in one line."""
    try:
        return kind.from_pretrained(directory, **options)
    # A library reads the file, and raises errors of its own.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TrainingError(f"--model: {directory}: {reason}") from error
