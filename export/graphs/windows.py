"""The masks of layers with a sliding window, derived inside the graph from the one mask that it is given."""

from typing import Any

import torch
from torch import Tensor

from drafters.target_models import FAMILIES, sliding_window


def key_positions(position_ids: Tensor, write_index: Tensor, capacity: int) -> Tensor:
    """Positions [B, S] of the keys in the cache during a step that writes N keys at ``write_index``.

    A slot before ``write_index`` holds the key of its own position. The N slots from there on hold the new
    keys, whose positions are ``position_ids`` [B, N]: in a tree several nodes share one. Slots after those
    are empty, and the mask that a step is given hides them.
    """
    slots = torch.arange(capacity, device=position_ids.device).expand(position_ids.shape[0], -1)
    token = slots - write_index.unsqueeze(1)
    # TensorRT's Clip takes no integers.
    is_new = (token >= 0) & (token < position_ids.shape[1])
    return torch.where(is_new, position_ids.gather(1, torch.where(is_new, token, 0)), slots)


def windowed_mask(
    mask: Tensor, position_ids: Tensor, write_index: Tensor, window: int, written: Tensor | None = None
) -> Tensor:
    """``mask`` [B, 1, N, S] without the keys that are ``window`` or more positions before their query.

    written: [B, W] int64, the positions of the keys that the step writes; None where they are the queries'
    """
    keys = key_positions(position_ids if written is None else written, write_index, mask.shape[-1])
    return mask & (keys[:, None, None, :] > position_ids[:, None, :, None] - window)


def attention_masks(config: Any, inputs: dict[str, Tensor], context: int) -> Tensor | dict[str, Tensor]:
    """``layer_masks`` of a pass that writes the key of every token that it reads."""
    positions, start = inputs["position_ids"], inputs["write_index"]
    return layer_masks(
        config,
        inputs["attn_mask"],
        positions=positions,
        written=positions,
        write_index=start,
        context=context,
    )


def layer_masks(
    config: Any, mask: Tensor, *, positions: Tensor, written: Tensor, write_index: Tensor, context: int
) -> Tensor | dict[str, Tensor]:
    """The mask of all layers, or of every type of layer, as the model's forward expects it.

    mask: [B, 1, N, S] bool; positions: [B, N] int64 of its rows; written: as of ``windowed_mask``
    context: the positions that are served; a window that reaches over all of them needs no mask of its own
    """
    window = sliding_window(config)
    if window is None or window >= context:
        return mask
    narrow = windowed_mask(mask, positions, write_index, window, written)
    if FAMILIES[config.model_type].window == "all":
        return narrow
    return {"full_attention": mask, "sliding_attention": narrow}
