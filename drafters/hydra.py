"""Hydra's heads (Ankner et al., arXiv 2402.05109): Medusa heads that see the tokens before theirs.

Head d predicts the token d + 1 places after the anchor. It reads the target model's last hidden state
before the anchor, h, and the embeddings e of the anchor and of the d drafts on the way:

    x      = [h, e_0, ..., e_d]
    x      = R_d x + silu(W_d x + b_d)
    x      = x + silu(W x + b)              head_depth - 1 times
    logits = lm_head(x)

Hydra has ``head_depth`` 1 and takes h after the target model's last norm. Hydra++ has ``head_depth`` 4
and, with ``num_layers`` 1, another decoder layer over the last layer's features before that norm
("prefix attention"); it is trained on the target model's distribution (``soft_labels``).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.autoregressive import AutoregressiveDrafter, Shape, causal_mask, root_indices
from drafters.config import DrafterConfig
from drafters.layers import (
    AttentionFunction,
    DraftLayer,
    KeyValueCache,
    RotaryEmbedding,
    pick,
    scaled_dot_product,
)


class HydraDrafter(AutoregressiveDrafter):
    """One head for every depth. All nodes of a tree share one state, h."""

    heads_per_depth = True

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(DraftLayer(config, layer) for layer in range(config.num_layers))
        self.heads = nn.ModuleList(
            HydraHead(config.hidden_size, depth, config.head_depth) for depth in range(config.num_frames)
        )

    @property
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        found = super().tensors
        if self.config.num_layers:
            found["context_position_ids"] = ("B", "A"), torch.int64
            found["attn_mask"] = ("B", 1, "Q", "S"), torch.bool
        for depth in range(self.config.num_frames):
            found[f"path_ids_{depth}"] = ("B", f"M{depth}", depth + 1), torch.int64
        return found

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> tuple[Tensor, Tensor]:
        """A depth without nodes costs next to nothing, so one graph serves all passes."""
        roots = self._roots(inputs, cache, attend)
        # One of the two is empty. Summed instead of picked, so that a graph knows the size of the axis.
        state = torch.cat((roots, inputs["states"]), dim=1).sum(1, keepdim=True)
        return self._hidden(state, [inputs[f"path_ids_{d}"] for d in range(self.config.num_frames)]), state

    def _roots(
        self, inputs: Mapping[str, Tensor], cache: KeyValueCache | None, attend: AttentionFunction
    ) -> Tensor:
        """h [B, Q, H] of the context tokens that are roots."""
        last_layer = inputs["features"][..., -self.config.hidden_size :]
        queries = inputs["query_indices"]
        roots = pick(last_layer, queries)
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            position_ids, normed = inputs["context_position_ids"], layer.input_norm(last_layer)
            roots = layer.update(
                roots,
                pick(normed, queries),
                normed,
                self.rotary(position_ids),
                self.rotary(position_ids.gather(1, queries)),
                inputs["attn_mask"],
                cache,
                attend,
            )
        return self.norm(roots)

    def _hidden(self, state: Tensor, paths: list[Tensor]) -> Tensor:
        """state [B, 1, H]; paths of the first depths, each [B, M_d, d+1] -> [B, sum of M_d, H]."""
        found = []
        for head, path in zip(self.heads, paths, strict=False):
            tokens = self.embed(path).flatten(2)  # [B, M_d, (d+1)*H]
            found.append(head(torch.cat((state.expand(-1, path.shape[1], -1), tokens), dim=-1)))
        return torch.cat(found, dim=1)

    def unrolled_hidden(
        self, features: Tensor, input_ids: Tensor, positions: Tensor, targets: Tensor
    ) -> Tensor:
        batch, length = input_ids.shape
        roots = root_indices(positions)
        inputs = {
            "features": features,
            "query_indices": roots,
            "context_position_ids": torch.arange(length, device=roots.device).expand(batch, -1),
            "attn_mask": causal_mask(roots, length),
        }
        state = self._roots(inputs, None, scaled_dot_product)
        anchors = input_ids.gather(1, positions.clamp(min=0)).unsqueeze(-1)
        tokens = torch.cat((anchors, targets), dim=-1).flatten(0, 1).unsqueeze(1)  # [B*M, 1, 1+U]
        depth = min(self.config.num_frames, targets.shape[-1])
        paths = [tokens[..., : d + 1] for d in range(depth)]
        return self._hidden(state.flatten(0, 1).unsqueeze(1), paths)


class HydraHead(nn.Module):
    """The MLP of depth d: from d + 2 vectors to one. An untrained one returns h."""

    def __init__(self, hidden_size: int, depth: int, num_blocks: int):
        super().__init__()
        width = (depth + 2) * hidden_size
        self.residual = nn.Linear(width, hidden_size, bias=False)
        self.blocks = nn.ModuleList(
            nn.Linear(hidden_size if block else width, hidden_size) for block in range(num_blocks)
        )
        with torch.no_grad():
            self.residual.weight.zero_()
            self.residual.weight[:, :hidden_size] = torch.eye(hidden_size)
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., (d+2)*H] -> [..., H]."""
        first, *others = self.blocks
        x = self.residual(x) + F.silu(first(x))
        for block in others:
            x = x + F.silu(block(x))
        return x
