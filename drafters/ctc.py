"""The CTC draft head (Wen, Gui, Feng: "Speculative Decoding with CTC-based Draft Model", 2024).

T learned frame queries, the first carrying the anchor token's embedding, attend to the projected
hidden states of the backbone and to each other. Every frame is a distribution over the vocabulary
and a blank: the backbone's frozen LM head plus one row of the head's own.

    features        [B, A, F*H]   float  backbone hidden states of new context tokens
    context_position_ids [B, A]   int64  their positions
    anchor_ids      [B, M]        int64  the last token of each of M anchors, not yet in the context
    frame_position_ids [B, M*T]   int64  anchor position + frame index
    attn_mask       [B, 1, M*T, S] bool  True = attend; S = A + M*T, or the cache's capacity
    ->
    logits          [B, M*T, V+1] float  of every label and, last, the blank
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.config import CONFIG_NAME, DrafterConfig, DrafterConfigError
from drafters.layers import (
    AttentionFunction,
    DraftLayer,
    KeyValueCache,
    RMSNorm,
    RotaryEmbedding,
    scaled_dot_product,
)

WEIGHTS_NAME = "model.safetensors"


class CTCDrafter(nn.Module):
    """A CTC draft head; ``attach_base`` gives it the backbone's embedding and LM head."""

    embed_tokens: Tensor
    lm_head: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.feature_norms = nn.ModuleList(
            RMSNorm(hidden, config.rms_norm_eps) for _ in config.target_layer_ids
        )
        self.feature_proj = nn.Linear(config.feature_size, hidden, bias=False)
        self.context_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.frame_queries = nn.Parameter(torch.randn(config.num_frames, hidden) * 0.02)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(
            DraftLayer(
                hidden_size=hidden,
                intermediate_size=config.intermediate_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
                layer=layer,
            )
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.blank = nn.Linear(hidden, 1)
        # Frozen, owned by the backbone, absent from the checkpoint.
        self.register_buffer("embed_tokens", torch.empty(0), persistent=False)
        self.register_buffer("lm_head", torch.empty(0), persistent=False)

    def attach_base(self, embed_tokens: Tensor, lm_head: Tensor) -> "CTCDrafter":
        """Share the backbone's frozen embedding and LM head, each [V, H]."""
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(tensor.shape) != expected:
                raise DrafterConfigError(
                    f"{name} of the backbone must have shape {expected} for this drafter, "
                    f"got {tuple(tensor.shape)}"
                )
        self.embed_tokens = embed_tokens.detach()
        self.lm_head = lm_head.detach()
        return self

    def forward(
        self,
        features: Tensor,
        context_position_ids: Tensor,
        anchor_ids: Tensor,
        frame_position_ids: Tensor,
        attn_mask: Tensor,
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> Tensor:
        """Frame logits [B, M*T, V+1]; arguments as in the module's table.

        With a ``cache``, the keys and values of context and frames go through it.
        """
        per_layer = features.chunk(len(self.config.target_layer_ids), dim=-1)
        normed = [norm(part) for norm, part in zip(self.feature_norms, per_layer, strict=True)]
        context = self.context_norm(self.feature_proj(torch.cat(normed, dim=-1)))

        anchors = F.embedding(anchor_ids, self.embed_tokens).unsqueeze(2)  # [B, M, 1, H]
        anchors = F.pad(anchors, (0, 0, 0, self.config.num_frames - 1))  # [B, M, T, H]
        frames = (anchors + self.frame_queries).flatten(1, 2)

        row_rotary = self.rotary(torch.cat((context_position_ids, frame_position_ids), dim=1))
        frame_rotary = self.rotary(frame_position_ids)
        for layer in self.layers:
            frames = layer(frames, context, row_rotary, frame_rotary, attn_mask, cache, attend)
        frames = self.norm(frames)
        return torch.cat((F.linear(frames, self.lm_head), self.blank(frames)), dim=-1)

    def save_pretrained(self, directory: Path | str, *, dtype: torch.dtype = torch.float32) -> None:
        """Write ``config.json`` and ``model.safetensors``, the weights in ``dtype``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        weights = {name: value.to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(weights, directory / WEIGHTS_NAME)
        (directory / CONFIG_NAME).write_text(
            json.dumps(self.config.to_dict(), indent=2) + "\n", encoding="utf-8"
        )

    @classmethod
    def from_pretrained(cls, directory: Path | str) -> "CTCDrafter":
        """Load a checkpoint in float32. Raises DrafterConfigError naming what is wrong with it."""
        directory = Path(directory)
        model = cls(DrafterConfig.load(directory))
        path = directory / WEIGHTS_NAME
        if not path.is_file():
            raise DrafterConfigError(f"{directory} is no drafter checkpoint: {WEIGHTS_NAME} is missing")
        try:
            model.load_state_dict(load_file(path))
        except Exception as error:
            raise DrafterConfigError(f"{path} does not fit its {CONFIG_NAME}: {error}") from error
        return model
