"""The frames of a head whose context is in TensorRT-LLM's arena.

The arena has a slot for every sequence and in it, layer by layer, the keys and values of the positions from 0
on. The layers are those of ``drafters.layers``. Every device computes the whole head.
"""

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import DraftLayer, rotate
from integrations.frames import HeadParts


class Arena:
    """The context of B sequences as the cache of one pass, whose own keys and values are not kept.

    keys, values: [slots, layers, positions, KV heads, D]; slots: [B] int64
    """

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor):
        self._keys, self._values, self._slots = keys, values, slots
        self.size = keys.shape[2]

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As ``KeyValueCache``: new ones [B, KV heads, T, D] -> [B, KV heads, positions + T, D]."""
        kept = (table[self._slots, layer].transpose(1, 2) for table in (self._keys, self._values))
        keys, values = (torch.cat(pair, dim=2) for pair in zip(kept, (key, value), strict=True))
        return keys, values


class Frames(HeadParts):
    """``drafters.attention.AttentionFrames`` on the arena."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.draft_layers = [DraftLayer(config, layer) for layer in range(config.num_layers)]
        self.layers = nn.ModuleList(self.draft_layers)

    def context_keys_values(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Projected context [N, H] at positions [N] -> keys and values, each [N, layers, KV heads, D]."""
        rotary = self.rotary(positions.unsqueeze(0))
        keys, values = [], []
        for layer in self.draft_layers:
            key, value = (
                projection(context).unflatten(-1, (layer.num_kv_heads, layer.head_dim))
                for projection in (layer.k_proj, layer.v_proj)
            )
            # rotate wants the heads before the positions.
            keys.append(rotate(key.transpose(0, 1).unsqueeze(0), *rotary).squeeze(0).transpose(0, 1))
            values.append(value)
        return torch.stack(keys, dim=1), torch.stack(values, dim=1)

    def forward(
        self, anchors: Tensor, last: Tensor | None, positions: Tensor, lengths: Tensor, arena: Arena
    ) -> Tensor:
        """The hidden states [B, T, H] of all frames.

        anchors: [B, H], embedded; last: as for ``begin``; positions: [B] int64, the anchors'
        lengths: [B], the context's
        """
        count = self.head_config.num_frames
        frame_positions = positions.unsqueeze(1) + torch.arange(count, device=positions.device)
        rotary = self.rotary(frame_positions)
        is_context = torch.arange(arena.size, device=lengths.device) < lengths.unsqueeze(1)
        is_frame = is_context.new_ones(1, count).expand(len(positions), -1)
        # Every frame sees the same: the context and all frames.
        mask = torch.cat((is_context, is_frame), dim=1)[:, None, None, :]
        frames = self.begin(anchors, last, count)
        for layer in self.draft_layers:
            normed = layer.input_norm(frames)
            frames = layer.update(frames, normed, normed, rotary, rotary, mask, arena, attend)
        hidden: Tensor = self.norm(frames)
        return hidden


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """As ``scaled_dot_product``, for a mask [B, 1, 1, S] that is every query's.

    The query heads that share keys stand below each other as rows of one head, because the fast kernels for
    masks take as many query heads as key heads.
    """
    heads, count = query.shape[1:3]
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    found = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
    return found.unflatten(2, (-1, count)).reshape(-1, heads, count, query.shape[-1])
