"""Fresh draft heads for a target model, with random weights or with those of another head."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from drafters.base import Drafter, load_weights
from drafters.build import build_drafter
from drafters.config import WEIGHTS_NAME, DrafterConfig, DrafterConfigError, HeadSettings
from drafters.layers import DraftLayer
from drafters.target_models import rope_parameters
from training.config import TrainingConfig
from training.head_config import HeadConfig
from training.settings import TrainingError
from training.target_model import SharedTables, target_digest


def drafter_config(base: Any, settings: HeadConfig, config: TrainingConfig) -> DrafterConfig:
    """The configuration of a head; ``base`` is that of the target model. Raises TrainingError."""
    where = f"head {settings.name!r}: " if settings.name else ""
    shape = {field.name: getattr(settings, field.name) for field in dataclasses.fields(HeadSettings)}
    shape["intermediate_size"] = settings.intermediate_size or base.intermediate_size
    try:
        return DrafterConfig(
            **shape,
            vocab_size=base.vocab_size,
            hidden_size=base.hidden_size,
            num_heads=base.num_attention_heads,
            num_kv_heads=getattr(base, "num_key_value_heads", None) or base.num_attention_heads,
            head_dim=getattr(base, "head_dim", None) or base.hidden_size // base.num_attention_heads,
            target_layer_ids=config.target_layer_ids
            or settings.default_target_layers(base.num_hidden_layers),
            base_num_layers=base.num_hidden_layers,
            rope_theta=float(rope_parameters(base)["full_attention"].get("rope_theta", 10000.0)),
            rms_norm_eps=base.rms_norm_eps,
            base_model=config.model_name,
            base_model_revision=getattr(base, "_commit_hash", None),
        )
    except DrafterConfigError as error:
        name, said, rest = str(error).partition(" must be ")
        problem = f"--{name.replace('_', '-')}: must be {rest}" if said and not where else str(error)
        raise TrainingError(where + problem) from error


def make_head(
    model: Any,
    settings: HeadConfig,
    config: TrainingConfig,
    tables: SharedTables | None = None,
    token_counts: Tensor | None = None,
) -> Drafter:
    """A fresh head of the target model's width, which shares the model's embedding and LM head.

    tables: the shared weights, if several heads share one copy
    token_counts: [V], how often the data's continuations have each token; the most frequent are the tokens
        that a head with a draft vocabulary drafts
    """
    shape = drafter_config(model.config, settings, config)
    torch.manual_seed(settings.seed)
    head = build_drafter(dataclasses.replace(shape, base_weights=target_digest(model, config.model)))
    if head.draft_token_ids is not None and token_counts is not None:
        # Of equal counts lower numbers come first: tokenizers that merge pairs number frequent ones first.
        most_frequent = token_counts.argsort(descending=True, stable=True)[: shape.label_count]
        head.set_draft_vocabulary(most_frequent.sort().values)
    tables = tables or SharedTables.of(model, config.precision, model.device)
    head = head.to(tables.embed_tokens.device)
    tables.attach(head, model)
    if settings.init_from:
        warm_start(head, settings.init_from)
    return head


def fitting_weights(head: Drafter, directory: Path) -> dict[str, Tensor]:
    """The weights of another head's checkpoint that fit a head, which may be on the meta device.

    Frame queries are taken frame by frame; frames beyond those of the other head start as its last one.
    Raises TrainingError if no weight fits.
    """
    path = directory / WEIGHTS_NAME
    try:
        weights = load_weights(path)
    except (OSError, SafetensorError, KeyError) as error:
        raise TrainingError(f"--init-from: {path} cannot be read: {error}") from error
    own = head.state_dict()
    queries = weights.get("frame_queries")
    if queries is not None and "frame_queries" in own and queries.shape[1:] == own["frame_queries"].shape[1:]:
        frames = torch.arange(own["frame_queries"].shape[0]).clamp(max=queries.shape[0] - 1)
        weights["frame_queries"] = queries[frames]
    if head.config.trunk_type.borrows_layers:
        weights = adapters_from_the_top(weights, head.config.num_layers)
    taken = {name: value for name, value in weights.items() if name in own and value.shape == own[name].shape}
    if not taken:
        raise TrainingError(f"--init-from: no weight of {directory} fits this head")
    return taken


def warm_start(head: Drafter, directory: Path) -> list[str]:
    """Copy every weight that fits from another head's checkpoint, and return their names.

    Layers beyond those of the other head start as the identity, so that the deeper head drafts what the
    other one does. Raises TrainingError if no weight fits.
    """
    taken = fitting_weights(head, directory)
    head.load_state_dict(head.state_dict() | taken)
    if any(name.startswith("layers.0.") for name in taken):
        for name, layer in head.named_modules():
            if isinstance(layer, DraftLayer) and not any(weight.startswith(f"{name}.") for weight in taken):
                layer.become_identity()
    return sorted(taken)


def adapters_from_the_top(weights: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The weights of another head's streams, renumbered so that each adapter keeps its layer of the model.

    Adapters are numbered from the first upper layer. If the two heads have different first upper layers, the
    weights that belong to that layer (exit adapter, stream embeddings, start) are left out.
    """
    theirs = {int(name.split(".")[1]) for name in weights if name.startswith("lora.")}
    shift = num_layers - len(theirs)
    if not theirs or not shift:
        return weights
    moved = {}
    for name, value in weights.items():
        where, _, rest = name.partition(".")
        if where == "lora":
            number, _, rest = rest.partition(".")
            moved[f"lora.{int(number) + shift}.{rest}"] = value
        elif where not in ("exit_adapter", "stream_embeddings", "start"):
            moved[name] = value
    return moved
