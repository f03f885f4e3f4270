"""Checks of models, heads and arguments of ``generate``, before anything is decoded.

Some models, and some ways to compute attention, ignore a mask of four dimensions or the positions that they
are given. ``check_tree_passes`` finds them with a few short passes, whatever the architecture.
"""

import inspect
import warnings
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, generation
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.generation import GenerationMode

from drafters.base import Drafter
from drafters.features import decoder_layers
from drafters.target_models import weights_digest
from integrations.draft_directory import model_problem
from integrations.transformers.drafts import DraftOptions
from integrations.transformers.loop import Prompts
from integrations.transformers.tree_cache import TreeCache, Window, capacity, window_of
from runtime.core.options import SHAPES
from runtime.core.token_tree import TokenTree

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
NEEDED = ("input_ids", "attention_mask", "position_ids", "past_key_values")
# ``generate`` prepares these; the loop sets them itself.
UNUSED = ("logits_to_keep", "use_cache", "cache_position")
# Layers of a cache that keep every key and value as it was computed.
LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
# Tokens before the root of the tree that ``check_tree_passes`` tries.
PROMPT_LENGTH = 6
# The errors that attention functions raise for a mask that they do not take.
MASK_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
# How far a branch in a tree may be from the branch alone, as a share of what one more visible token changes.
# Half precision rounds by a few percent of it; a model that sees a token too many is at 1.
LARGEST_SHARE = {torch.float32: 0.1}
LARGEST_SHARE_IN_HALF = 0.5


class GenerateError(ValueError):
    """A model, head or argument that cannot be used; the message names it, what was expected, what came."""


def check_options(options: DraftOptions) -> None:
    """Raises GenerateError for an unknown shape, and for a number of nodes below 1."""
    if options.shape not in SHAPES:
        raise GenerateError(f"tree: expected {' or '.join(map(repr, SHAPES))}, got {options.shape!r}")
    if not isinstance(options.num_nodes, int) or options.num_nodes < 1:
        raise GenerateError(f"num_nodes: expected a whole number of at least 1, got {options.num_nodes!r}")


def check_model(model: Any) -> None:
    """Raises GenerateError for a model whose cache cannot drop the rejected nodes of a tree."""
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


def check_layers(cache: Cache) -> None:
    """Raises GenerateError for a cache that does not keep every key and value as it was computed."""
    for layer in cache.layers:
        if type(layer) not in LAYERS:
            names = ", ".join(kind.__name__ for kind in LAYERS)
            raise GenerateError(
                f"past_key_values: expected layers that keep every token's keys and values ({names}), "
                f"got {type(layer).__name__}"
            )
    if cache.offloading:
        raise GenerateError("cache_implementation: expected dynamic or static, got an offloaded cache")


@torch.no_grad()
def check_tree_passes(model: Any) -> Window | None:
    """Try a pass over a tree: a root with two children, of which the second must not see the first.

    Returns the model's sliding window where it takes the masks for it, else None: then only texts that fit
    into the window can be decoded. Raises GenerateError if the model does not compute trees right.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, PROMPT_LENGTH + 4).remainder(vocab_size).to(model.device).unsqueeze(0)
    prompt, root, child, other = ids.split([PROMPT_LENGTH, 1, 1, 1], dim=1)

    def last_logits(*parts: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=torch.cat(parts, dim=1), use_cache=False).logits[0, -1]
        return logits.float()

    alone = last_logits(prompt, root, other)
    effect = (last_logits(prompt, root, child, other) - alone).abs().max().item()
    most = LARGEST_SHARE.get(model.dtype, LARGEST_SHARE_IN_HALF) * effect

    def error(window: Window | None) -> float:
        in_tree = _tree_logits(model, prompt, (root, child, other), window)
        return (in_tree.float() - alone).abs().max().item()

    window = window_of(model.config)
    # A cache that forgets cannot hold even this text if the window is narrower.
    is_narrow = window is not None and window.size <= PROMPT_LENGTH + 3
    try:
        found = error(window if is_narrow else None)
    except MASK_ERRORS as problem:
        raise GenerateError(
            f"model: expected a forward pass over a tree, with a mask of four dimensions, got "
            f"{type(model).__name__}, which raises {type(problem).__name__}: {problem}"
        ) from problem
    if not found <= most:
        raise GenerateError(
            f"model: expected attention that takes a mask of four dimensions and positions, got "
            f"{type(model).__name__}, whose logits after a branch of a tree are off by {found:.2g} (another "
            f'token in sight changes them by {effect:.2g}); try attn_implementation="sdpa" or "eager"'
        )
    try:
        return window if window is not None and error(window) <= most else None
    except MASK_ERRORS:
        return None


def _tree_logits(
    model: Any, prompt: torch.Tensor, nodes: tuple[torch.Tensor, ...], window: Window | None
) -> torch.Tensor:
    """Logits [V] after the last of three nodes [1, 1], of which the first is the others' parent."""
    cache = DynamicCache() if window else DynamicCache(config=model.config)
    positions = torch.arange(PROMPT_LENGTH, device=model.device).unsqueeze(0)
    model(input_ids=prompt, position_ids=positions, past_key_values=cache, use_cache=True)
    depths = np.array([0, 1, 1])
    tree = TokenTree(np.zeros(3, np.int64), np.array([-1, 0, 0]), depths, np.zeros(3))
    trees = TreeCache(cache, torch.ones_like(prompt, dtype=torch.bool), window)
    logits: torch.Tensor = model(
        input_ids=torch.cat(nodes, dim=1),
        attention_mask=trees.mask([tree], model.dtype),
        position_ids=PROMPT_LENGTH + torch.from_numpy(depths).to(model.device).unsqueeze(0),
        past_key_values=cache,
        use_cache=True,
    ).logits[0, -1]
    return logits


def check_head(head: Drafter, model: Any) -> None:
    """Raises GenerateError for a head that cannot draft for the model.

    Warns if the head was trained for a model of other weights.
    """
    config, base = head.config, model.config.get_text_config(decoder=True)
    if config.trunk_type.borrows_layers:
        raise GenerateError(
            f"trunk: expected a head with passes of its own, got {config.trunk!r}, which runs through layers "
            "of the target model; our runtime decodes with it"
        )
    problem = model_problem(
        config,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        hidden_size=base.hidden_size,
        num_layers=base.num_hidden_layers,
    )
    if problem:
        raise GenerateError(problem)
    if model.get_output_embeddings() is None:
        raise GenerateError(f"model: expected an LM head, got {type(model).__name__}, which has none")
    # In half precision even the right weights have another digest, because they are rounded.
    if config.base_weights and model.dtype == torch.float32 and config.base_weights != weights_digest(model):
        warnings.warn(
            "the head was trained for a model of other weights: the text stays the model's own, but fewer "
            "drafts may be accepted",
            stacklevel=4,
        )


def check_config(config: GenerationConfig, processors: Any, batch_size: int) -> None:
    """Raises GenerateError for settings of ``generate`` with which no drafts can be verified."""
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
    model: Any,
) -> Prompts:
    """The prompts that ``generate`` hands over. Raises GenerateError for an argument that cannot be used.

    given: the other arguments of ``generate``, by name
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
    cache, window = _cache_for(config.max_length, cache, window, DynamicCache(config=model.config))
    return Prompts(
        input_ids.to(model.device),
        positions.to(model.device),
        None if mask is None else mask.to(model.device),
        config.max_length,
        cache,
        window,
        config.prefill_chunk_size,
    )


def _cache_for(max_length: int, cache: Any, window: Window | None, usual: Cache) -> tuple[Any, Window | None]:
    """A cache with room for the texts, and the window that the masks have to show.

    usual: the model's own cache, whose layers have its windows. A cache that is given may keep everything
    where the model's layers still attend to a window.
    """
    own = capacity(cache)
    limit = capacity(usual) if own is None else own
    if limit is None or limit >= max_length - 1:
        return cache, None
    if window is not None and not any(isinstance(layer, StaticLayer) for layer in cache.layers):
        # These layers keep everything. A full window would forget the tokens that rejected drafts displace.
        return (cache if own is None else DynamicCache()), window
    raise GenerateError(
        f"max_length: expected at most {limit + 1}, because a layer with a sliding window, or a cache of "
        f"fixed size, has {limit} slots, and drafts cannot be taken back out of a full one, got {max_length}"
    )
