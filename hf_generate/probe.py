"""Whether a model computes a tree in one pass as it computes its branches one by one.

Some models, and some ways to compute attention, ignore a mask of four dimensions or the positions that they
are given. Three short passes show it for any architecture.
"""

from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from hf_generate.errors import GenerateError
from hf_generate.tree_cache import TreeCache

PROMPT_LENGTH = 6
# How far a branch in a tree may be from the branch alone, as a share of what one more visible token changes.
# Half precision rounds by a few percent of it; a model that sees a token too many is at 1.
LARGEST_SHARE = {torch.float32: 0.1}
LARGEST_SHARE_IN_HALF = 0.5


@torch.no_grad()
def check_tree_passes(model: Any) -> None:
    """Raises GenerateError if the second child of a node is not computed as if it were the only one."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, PROMPT_LENGTH + 4).remainder(vocab_size).to(model.device).unsqueeze(0)
    prompt, node, child, other = ids.split([PROMPT_LENGTH, 1, 1, 1], dim=1)

    def last_logits(*parts: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=torch.cat(parts, dim=1), use_cache=False).logits[0, -1]
        return logits.float()

    alone = last_logits(prompt, node, other)
    with_sibling = last_logits(prompt, node, child, other)
    try:
        in_tree = _tree_logits(model, prompt, torch.cat((node, child, other), dim=1))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as problem:
        # Whatever an attention function says about a mask that it does not take.
        raise GenerateError(
            f"model: expected a forward pass over a tree, with a mask of four dimensions, got "
            f"{type(model).__name__}, which raises {type(problem).__name__}: {problem}"
        ) from problem
    error = (in_tree.float() - alone).abs().max().item()
    effect = (with_sibling - alone).abs().max().item()
    if not error <= LARGEST_SHARE.get(model.dtype, LARGEST_SHARE_IN_HALF) * effect:
        raise GenerateError(
            f"model: expected attention that takes a mask of four dimensions and positions, got "
            f"{type(model).__name__}, whose logits after a branch of a tree are off by {error:.2g} (another "
            f'token in sight changes them by {effect:.2g}); try attn_implementation="sdpa" or "eager"'
        )


def _tree_logits(model: Any, prompt: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
    """Logits [V] after the last of three nodes [1, 3], of which the first is the others' parent."""
    cache = DynamicCache(config=model.config)
    positions = torch.arange(PROMPT_LENGTH, device=model.device).unsqueeze(0)
    model(input_ids=prompt, position_ids=positions, past_key_values=cache, use_cache=True)
    trees = TreeCache(cache, torch.ones_like(prompt, dtype=torch.bool))
    logits: torch.Tensor = model(
        input_ids=nodes,
        attention_mask=trees.mask([np.array([-1, 0, 0])], model.dtype),
        position_ids=PROMPT_LENGTH + torch.tensor([[0, 1, 1]], device=model.device),
        past_key_values=cache,
        use_cache=True,
    ).logits[0, -1]
    return logits
