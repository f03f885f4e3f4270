"""EAGLE-3 (Li et al., arXiv 2503.01840): one attention layer that runs ahead of the target model.

Context token i is read as its features and the embedding of token i + 1, a node as its parent's state and
its own token's embedding:

    g      = context_projection(features)   of a context token, or the parent's state of a node
    state  = layer(g; attending to [norm(embedding), norm(g)] of itself and all tokens before it)
    logits = lm_head(norm(state))

So the last context token carries the anchor and is the tree's root.
With no loss on the states themselves, training unrolls the recurrence on the head's own states
("training-time test"): the first step from features, every other one from the step before.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter, Shape, causal_mask, root_indices
from drafters.config import DrafterConfig
from drafters.features import ContextProjection
from drafters.layers import (
    AttentionFunction,
    DraftLayer,
    KeyValueCache,
    RMSNorm,
    RotaryEmbedding,
    pick,
    scaled_dot_product,
)


class EagleDrafter(AutoregressiveDrafter):
    """One layer over context tokens and nodes."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.context = ContextProjection(config)
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layer = DraftLayer(config, 0, input_size=2 * config.hidden_size)

    @property
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        return super().tensors | {
            "context_token_ids": (("B", "A"), torch.int64),
            "context_position_ids": (("B", "A"), torch.int64),
            "token_ids": (("B", "N"), torch.int64),
            "position_ids": (("B", "N"), torch.int64),
            "attn_mask": (("B", 1, "P", "S"), torch.bool),
        }

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> tuple[Tensor, Tensor]:
        queries, states = inputs["query_indices"], inputs["states"]
        context_positions, positions = inputs["context_position_ids"], inputs["position_ids"]
        context = self.context(inputs["features"])
        of_context = self._layer_inputs(inputs["context_token_ids"], context)
        of_nodes = self._layer_inputs(inputs["token_ids"], states)
        new = self.layer.update(
            torch.cat((pick(context, queries), states), dim=1),
            torch.cat((pick(of_context, queries), of_nodes), dim=1),
            torch.cat((of_context, of_nodes), dim=1),
            self.rotary(torch.cat((context_positions, positions), dim=1)),
            self.rotary(torch.cat((context_positions.gather(1, queries), positions), dim=1)),
            inputs["attn_mask"],
            cache,
            attend,
        )
        return self.norm(new), new

    def _layer_inputs(self, token_ids: Tensor, vectors: Tensor) -> Tensor:
        """What queries, keys and values are made of: token_ids [B, R], vectors [B, R, H] -> [B, R, 2H]."""
        return torch.cat((self.embed_norm(self.embed(token_ids)), self.layer.input_norm(vectors)), dim=-1)

    def unrolled_hidden(
        self, features: Tensor, input_ids: Tensor, positions: Tensor, targets: Tensor
    ) -> Tensor:
        batch, length = input_ids.shape
        roots = root_indices(positions)
        mask = causal_mask(roots, length)
        own = torch.eye(roots.shape[1], dtype=torch.bool, device=mask.device).expand(batch, 1, -1, -1)
        cache = GrowingCache()
        nothing = input_ids[:, :0]
        inputs = {
            "features": features,
            # The last position has no token after it; no anchor of the sequence attends to it.
            "context_token_ids": F.pad(input_ids[:, 1:], (0, 1)),
            "context_position_ids": torch.arange(length, device=mask.device).expand(batch, -1),
            "query_indices": roots,
            "states": features.new_zeros(batch, 0, self.config.hidden_size),
            "token_ids": nothing,
            "position_ids": nothing,
            "attn_mask": mask,
        }
        hidden, states = self(inputs, cache=cache)
        steps = [hidden]
        empty = dict.fromkeys(("context_token_ids", "context_position_ids", "query_indices"), nothing)
        for step in range(1, min(self.config.num_frames, targets.shape[-1])):
            # A node sees its anchor's context and the earlier nodes of that anchor.
            mask = torch.cat((mask, own), dim=-1)
            inputs = empty | {
                "features": features[:, :0],
                "states": states,
                "token_ids": targets[..., step - 1],
                "position_ids": roots + step,
                "attn_mask": mask,
            }
            hidden, states = self(inputs, cache=cache)
            steps.append(hidden)
        return torch.stack(steps, dim=2).flatten(0, 1)


class GrowingCache:
    """Keeps the keys and values of every pass in order: the context's, then one portion for each step."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        self._parts.append((key, value))
        keys, values = zip(*self._parts, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)
