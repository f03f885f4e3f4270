"""What is refused before anything is decoded: models, heads and arguments of ``generate``."""

import inspect
import warnings
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, generation
from transformers.cache_utils import StaticLayer
from transformers.generation import GenerationMode

from drafters.base import Drafter
from drafters.features import decoder_layers
from drafters.target_models import weights_digest
from integrations.transformers.drafts import DraftOptions
from integrations.transformers.errors import GenerateError
from integrations.transformers.loop import Prompts
from integrations.transformers.tree_cache import Window, capacity, check_layers
from runtime.core.options import SHAPES

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
NEEDED = ("input_ids", "attention_mask", "position_ids", "past_key_values")
# Prepared by ``generate``; the loop sets these itself.
UNUSED = ("logits_to_keep", "use_cache", "cache_position")


def check_options(options: DraftOptions) -> None:
    """Raises GenerateError for a shape that is none, or no drafts."""
    if options.shape not in SHAPES:
        raise GenerateError(f"tree: expected {' or '.join(map(repr, SHAPES))}, got {options.shape!r}")
    if options.num_nodes < 1:
        raise GenerateError(f"num_nodes: expected at least 1, got {options.num_nodes}")


def check_model(model: Any) -> None:
    """Raises GenerateError for a model whose passes over a tree cannot be taken back."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise GenerateError(f"model: expected a decoder alone, got the encoder-decoder {name}")
    known = inspect.signature(model.forward).parameters
    missing = [argument for argument in NEEDED if argument not in known]
    if missing:
        raise GenerateError(
            f"model: expected a forward pass with the argument {missing[0]}, got {name}, which has none; it "
            "counts positions itself, or keeps states in place of keys and values"
        )
    for layer in DynamicCache(config=config).layers:
        if "Linear" in type(layer).__name__:
            raise GenerateError(
                f"model: expected attention in every layer, got {name}, which has recurrent or linear "
                f"layers ({type(layer).__name__}) whose states cannot be taken back"
            )
    check_layers(DynamicCache(config=config))
    try:
        decoder_layers(model)
    except ValueError as error:
        raise GenerateError(f"model: {error}") from error


def check_head(head: Drafter, model: Any) -> None:
    """Raises GenerateError for a head that cannot draft for the model; warns if its weights were others."""
    config, base = head.config, model.config.get_text_config(decoder=True)
    if config.trunk_type.borrows_layers:
        raise GenerateError(
            f"trunk: expected a head with passes of its own, got {config.trunk!r}, which runs through layers "
            "of the target model; our runtime decodes with it"
        )
    sizes = {
        "vocab_size": model.get_input_embeddings().weight.shape[0],
        "hidden_size": base.hidden_size,
        "base_num_layers": base.num_hidden_layers,
    }
    for field, expected in sizes.items():
        found = getattr(config, field)
        if found != expected:
            raise GenerateError(
                f"{field}: expected the model's {expected}, got {found}; the head was made for another model"
                f"{f', {config.base_model!r}' if config.base_model else ''}"
            )
    if model.get_output_embeddings() is None:
        raise GenerateError(f"model: expected an LM head, got {type(model).__name__}, which has none")
    # Rounded to half precision, the right weights have another digest.
    if config.base_weights and model.dtype == torch.float32 and config.base_weights != weights_digest(model):
        warnings.warn(
            "the head was trained for a model of other weights: the text stays the model's own, but fewer "
            "drafts may be accepted",
            stacklevel=4,
        )


def check_config(config: GenerationConfig, processors: Any, batch_size: int) -> None:
    """Raises GenerateError for a way to generate that has no drafts."""
    mode = config.get_generation_mode()
    if mode not in MODES or config.num_beams not in (None, 1):
        raise GenerateError(
            f"num_beams and generation mode: expected greedy search or sampling with num_beams=1, got "
            f"{mode.value} with num_beams={config.num_beams}"
        )
    for option in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, option):
            raise GenerateError(f"{option}: expected False, because trees are verified in one pass, got True")
    if config.use_cache is False:
        raise GenerateError("use_cache: expected True, because drafts are verified on a cache, got False")
    for processor in processors:
        guided = isinstance(processor, generation.UnbatchedClassifierFreeGuidanceLogitsProcessor)
        if guided and batch_size > 1:
            raise GenerateError(f"guidance_scale: expected a batch of one, got a batch of {batch_size}")


def prompts_of(
    input_ids: torch.Tensor,
    config: GenerationConfig,
    given: dict[str, Any],
    *,
    window: Window | None,
    device: torch.device,
) -> Prompts:
    """The prompts in what ``generate`` hands over. Raises GenerateError for what cannot be used of it.

    window: of the model's layers, if it takes masks for them
    """
    given = {name: value for name, value in given.items() if value is not None and name not in UNUSED}
    cache = given.pop("past_key_values", None)
    mask = given.pop("attention_mask", None)
    positions = given.pop("position_ids", None)
    if given:
        name, value = next(iter(given.items()))
        raise GenerateError(f"{name}: expected nothing but text, got {type(value).__name__}")
    batch_size, length = input_ids.shape
    if cache is None:
        raise GenerateError("past_key_values: expected the cache that generate prepares, got none")
    check_layers(cache)
    if int(cache.get_seq_length()):
        raise GenerateError(
            "past_key_values: expected an empty cache, because the draft head has to read the whole text, "
            f"got {int(cache.get_seq_length())} tokens"
        )
    for name, tensor in (("attention_mask", mask), ("position_ids", positions)):
        if tensor is not None and tensor.shape != (batch_size, length):
            raise GenerateError(f"{name}: expected shape {(batch_size, length)}, got {tuple(tensor.shape)}")
    if mask is not None and not mask[:, -1].all():
        raise GenerateError("attention_mask: expected padding on the left, got padding at the end")
    if mask is not None and (mask[:, 1:] < mask[:, :-1]).any():
        raise GenerateError("attention_mask: expected padding on the left alone, got some between tokens")
    if positions is None:
        is_text = torch.ones_like(input_ids) if mask is None else mask.long()
        positions = (is_text.cumsum(-1) - 1).clamp(min=0)
    cache, window = _cache_for(config.max_length, cache, window)
    return Prompts(
        input_ids.to(device),
        positions.to(device),
        None if mask is None else mask.to(device),
        config.max_length,
        cache,
        window,
        config.prefill_chunk_size,
    )


def _cache_for(max_length: int, cache: Any, window: Window | None) -> tuple[Any, Window | None]:
    """A cache with room for the texts, and the window that the masks have to show."""
    limit = capacity(cache)
    if limit is None or limit >= max_length - 1:
        return cache, None
    if window is not None and not any(isinstance(layer, StaticLayer) for layer in cache.layers):
        # Layers that keep everything: a full window would forget what a rejected draft takes the place of.
        return DynamicCache(), window
    raise GenerateError(
        f"max_length: expected at most {limit + 1}, because a layer with a sliding window, or a cache of "
        f"fixed size, has {limit} slots, and drafts cannot be taken back out of a full one, got {max_length}"
    )
