"""One vector for each context token, made of the target model's hidden states of several layers."""

import torch
from torch import Tensor, nn

from drafters.config import DrafterConfig
from drafters.layers import RMSNorm


class ContextProjection(nn.Module):
    """Norm every layer's hidden state, project them together, norm the result (EAGLE-3's fusion)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.feature_norms = nn.ModuleList(RMSNorm(hidden, eps) for _ in config.target_layer_ids)
        self.feature_proj = nn.Linear(config.feature_size, hidden, bias=False)
        self.context_norm = RMSNorm(hidden, eps)

    def forward(self, features: Tensor) -> Tensor:
        """features [B, A, F*H] -> [B, A, H]."""
        per_layer = features.chunk(len(self.feature_norms), dim=-1)
        normed = [norm(part) for norm, part in zip(self.feature_norms, per_layer, strict=True)]
        context: Tensor = self.context_norm(self.feature_proj(torch.cat(normed, dim=-1)))
        return context
