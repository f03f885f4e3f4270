"""The small modules of a head of speculative streams: what its streams begin as and what frames become."""

import torch.nn.functional as F
from torch import Tensor, nn

from drafters.config import DrafterConfig


class ResidualStart(nn.Module):
    """f(M) = M + W_2 silu(W_1 norm(M)), which starts as the identity."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size = config.start_size or config.hidden_size
        self.eps = config.rms_norm_eps
        self.up = nn.Linear(config.hidden_size, size, bias=False)
        self.down = nn.Linear(size, config.hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]."""
        normed = F.rms_norm(hidden, (hidden.shape[-1],), eps=self.eps)
        started: Tensor = hidden + self.down(F.silu(self.up(normed)))
        return started


class AnchorFusion(nn.Module):
    """A frame made of its stream s and the anchor's embedding e: s + W_2 silu(W_1 [s, norm(e)]).

    The streams know the text before the anchor, but not which token the anchor is. At first a frame is its
    stream.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.start_size or config.hidden_size
        self.eps = config.rms_norm_eps
        self.of_stream = nn.Linear(hidden, size, bias=False)
        self.of_anchor = nn.Linear(hidden, size, bias=False)
        self.down = nn.Linear(size, hidden, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, streams: Tensor, anchors: Tensor) -> Tensor:
        """streams [..., T, H] after the last norm, embedded anchors [..., H] -> [..., T, H]."""
        own = self.of_anchor(F.rms_norm(anchors, (anchors.shape[-1],), eps=self.eps))
        frames: Tensor = streams + self.down(F.silu(self.of_stream(streams) + own.unsqueeze(-2)))
        return frames
