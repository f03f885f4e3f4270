"""Whether a model computes a tree in one pass as it computes its branches one by one.

Some models, and some ways to compute attention, ignore a mask of four dimensions or the positions that they
are given. Three short passes show it for any architecture.
"""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from integrations.transformers.errors import GenerateError
from integrations.transformers.tree_cache import TreeCache, Window, window_of
from runtime.core.token_tree import TokenTree

PROMPT_LENGTH = 6
# Whatever an attention function says about a mask that it does not take.
MASK_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)
# How far a branch in a tree may be from the branch alone, as a share of what one more visible token changes.
# Half precision rounds by a few percent of it; a model that sees a token too many is at 1.
LARGEST_SHARE = {torch.float32: 0.1}
LARGEST_SHARE_IN_HALF = 0.5


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
