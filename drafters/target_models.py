"""The target models, by Hugging Face model type: which are supported, and how they differ from each other."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Rotary embeddings whose frequencies do not depend on the length of the text.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DIGEST_ROWS = 256
# The file with a model's end tokens.
GENERATION_CONFIG = "generation_config.json"


class TargetModelError(ValueError):
    """A target model that is not supported; the message names the field of its ``config.json``."""


@dataclass(frozen=True)
class Family:
    """Properties of a model type that its configuration does not state.

    window: the layers that attend to ``sliding_window`` tokens only: ``none``, ``all`` if the setting is
        given, or ``by_layer`` as ``layer_types`` lists them
    norm_offset: the constant that the model adds to the stored weights of its RMS norms
    logits: the function after the LM head: ``linear`` (none), ``scaled`` (by ``logits_scaling``) or
        ``capped`` (softly, by ``final_logit_softcapping`` if the setting is given)
    """

    window: str = "none"
    norm_offset: float = 0.0
    logits: str = "linear"


MODEL_FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="all"),
    "mixtral": Family(window="all"),
    "qwen2": Family(window="by_layer"),
    "qwen3": Family(window="by_layer"),
    "qwen3_moe": Family(window="all"),
    "gemma2": Family(window="by_layer", norm_offset=1.0, logits="capped"),
    "gemma3_text": Family(window="by_layer", norm_offset=1.0, logits="capped"),
    "granite": Family(logits="scaled"),
    "olmo2": Family(),
    "phi3": Family(window="all"),
    "smollm3": Family(window="by_layer"),
}


def check_model_type(model_type: str) -> None:
    """Raises TargetModelError for a type that is not supported."""
    if model_type not in MODEL_FAMILIES:
        raise TargetModelError(f"model_type: must be one of {', '.join(MODEL_FAMILIES)}, got {model_type!r}")


def check_target_model(config: Any) -> None:
    """Raises TargetModelError for a model that cannot be represented exactly."""
    check_model_type(config.model_type)
    if getattr(config, "quantization_config", None):
        raise TargetModelError("quantization_config: expected weights in floats, got quantised ones")
    for rope in rope_parameters(config).values():
        rope_type = rope.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise TargetModelError(
                f"rope_type: must be one of {', '.join(ROPE_TYPES)} (the others change with the length), "
                f"got {rope_type!r}"
            )
    if getattr(config, "use_bidirectional_attention", None):
        raise TargetModelError("use_bidirectional_attention: expected causal attention, got true")


def rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """The rotary embedding's settings by layer type; most models have ``full_attention`` alone."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer: dict[str, dict[str, Any]] = rope if "full_attention" in rope else {"full_attention": rope}
    return by_layer


def sliding_window(config: Any) -> int | None:
    """How many tokens the layers with a sliding window attend to, or None if no layer has one."""
    family = MODEL_FAMILIES[config.model_type]
    has_window = family.window == "all" or (
        family.window == "by_layer" and "sliding_attention" in config.layer_types
    )
    return config.sliding_window if has_window else None


def layer_types(config: Any) -> tuple[str, ...]:
    """``full_attention`` or ``sliding_attention`` for every decoder layer."""
    if sliding_window(config) is None:
        return ("full_attention",) * config.num_hidden_layers
    if MODEL_FAMILIES[config.model_type].window == "all":
        return ("sliding_attention",) * config.num_hidden_layers
    return tuple(config.layer_types)


def output_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H] that have passed the last norm."""
    logits: Tensor = model.lm_head(hidden)
    config = model.config
    kind = MODEL_FAMILIES[config.model_type].logits
    if kind == "scaled":
        return logits / config.logits_scaling
    if kind == "capped" and config.final_logit_softcapping is not None:
        return (logits / config.final_logit_softcapping).tanh() * config.final_logit_softcapping
    return logits


def last_layer_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [..., V] of the last decoder layer's output [..., H]."""
    return output_logits(model, model.get_decoder().norm(hidden))


def output_norm_weight(model: Any) -> Tensor:
    """The weight [H] of an RMS norm after which the LM head alone gives the logits, apart from a soft cap."""
    family = MODEL_FAMILIES[model.config.model_type]
    weight: Tensor = model.get_decoder().norm.weight + family.norm_offset
    return weight / model.config.logits_scaling if family.logits == "scaled" else weight


def weights_digest(model: Any) -> str:
    """A digest of the last norm and of some rows of the embedding, which identifies a model.

    model: its weights in memory as they are stored, or in a type that holds them exactly
    """
    return digest_of(model.get_decoder().norm.weight, model.get_input_embeddings().weight[:DIGEST_ROWS])


def digest_of(norm_weight: Tensor, rows: Tensor) -> str:
    """The digest of the last norm's weight [H] and the embedding's first DIGEST_ROWS rows [R, H]."""
    digest = hashlib.sha256()
    for weight in (norm_weight, rows):
        digest.update(weight.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
