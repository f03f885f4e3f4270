"""Many anchors of a sequence in one pass of the draft head.

An anchor is a position p where a draft starts. There the head knows the features of all tokens before p
and the token at p itself, and predicts the tokens after p. Frames of different anchors share the context's
keys and values, and a block mask keeps them apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnchorBatch:
    """The draft head's inputs and targets for M anchors in each of B sequences of S tokens.

    anchor_ids [B, M], frame_position_ids [B, M*T], attn_mask [B, 1, M*T, S + M*T] bool
    targets [B, M, U], lengths [B, M]: the tokens after each anchor; length 0 marks a padding anchor
    """

    anchor_ids: Tensor
    frame_position_ids: Tensor
    attn_mask: Tensor
    targets: Tensor
    lengths: Tensor


def draw_anchors(starts: Tensor, ends: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` distinct positions of every sequence, uniform over [start, end); -1 for missing ones.

    starts, ends: [B] int64. Returns [B, count] int64, on the CPU.
    """
    size = int(ends.max())
    keys = torch.rand(starts.shape[0], size, generator=generator)
    positions = torch.arange(size)
    outside = (positions < starts.unsqueeze(1)) | (positions >= ends.unsqueeze(1))
    keys = keys.masked_fill(outside, 2.0)
    chosen = keys.argsort(dim=1)[:, :count]
    chosen = chosen.masked_fill(keys.gather(1, chosen) > 1.0, -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def make_anchor_batch(
    input_ids: Tensor, ends: Tensor, positions: Tensor, *, num_frames: int, num_labels: int
) -> AnchorBatch:
    """The inputs and targets of the anchors at ``positions``.

    input_ids [B, S]; ends [B]: length of each sequence; positions [B, M], -1 for no anchor.
    """
    batch, length = input_ids.shape
    anchors = positions.clamp(min=0)
    steps = torch.arange(1, num_labels + 1, device=input_ids.device)
    at = anchors.unsqueeze(-1) + steps  # [B, M, U]
    lengths = (ends.unsqueeze(1) - 1 - anchors).clamp(0, num_labels)
    lengths = lengths.masked_fill(positions < 0, 0)
    targets = input_ids.gather(1, at.clamp(max=length - 1).flatten(1)).view_as(at)

    frames = torch.arange(num_frames, device=input_ids.device)
    frame_positions = (anchors.unsqueeze(-1) + frames).flatten(1)  # [B, M*T]
    owner = torch.arange(positions.shape[1], device=input_ids.device).repeat_interleave(num_frames)
    context = torch.arange(length, device=input_ids.device)
    # A frame sees the context before its anchor, and its anchor's frames.
    sees_context = context < anchors.repeat_interleave(num_frames, dim=1).unsqueeze(-1)
    sees_frames = (owner.unsqueeze(1) == owner).expand(batch, -1, -1)
    mask = torch.cat((sees_context, sees_frames), dim=-1).unsqueeze(1)
    return AnchorBatch(input_ids.gather(1, anchors), frame_positions, mask, targets, lengths)
