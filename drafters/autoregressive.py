"""Heads that draft token after token: what they share.

One recurrence serves them. A node of the draft tree has a *state*; a row is computed from its
parent's state and its own token, and says how likely every child is. The root's parent is the
context: the backbone's features of the tokens before the anchor.

The root's row needs the context, all other rows need states. A pass takes both, either of which may
be empty, so that a drafter reads new context in its first pass and none in the others. Every head
reads the first three of these; those with an attention layer (one, as in both papers) the next two:

    features              [B, A, F*H]   float  backbone hidden states of new context tokens
    query_indices         [B, Q]        int64  which of the A rows are roots to draft from
    states                [B, N, H]     float  states of the parents of draft rows
    context_position_ids  [B, A]        int64
    attn_mask             [B, 1, P, S]  bool   EAGLE; [B, 1, Q, S] Hydra; S: rows of the pass or the cache
    context_token_ids     [B, A]        int64  EAGLE: each the token after the context row's own
    token_ids             [B, N]        int64  EAGLE: the draft rows' own
    position_ids          [B, N]        int64  EAGLE: the anchor's root stands at the last context position
    path_ids_d            [B, M_d, d+1] int64  Hydra, every depth d: the anchor and the drafts down to a row
    ->
    hidden                [B, M, H]     float  what ``logits`` and ``best_children`` read
    states                [B, P, H]     float  what the rows hand on, P = Q + N

EAGLE's rows are the Q roots and the N draft rows, each with a state of its own: M = P. Hydra's are
those of the paths, M = M_0 + ... + M_(D-1), and one state serves all of them: P = 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.layers import AttentionFunction, KeyValueCache, RMSNorm, scaled_dot_product

# Sizes, and names of axes that differ from pass to pass.
Shape = tuple[int | str, ...]


class AutoregressiveDrafter(Drafter, ABC):
    """Base of the sequential heads. ``num_frames`` is the depth D they draft to.

    heads_per_depth: whether every depth has a head of its own and all rows share one state
    """

    heads_per_depth = False

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    @abstractmethod
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """The inputs that this head reads, of those in the module's table."""

    @abstractmethod
    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> tuple[Tensor, Tensor]:
        """One pass: hidden, states.

        With a ``cache``, the keys and values of A context rows, then of EAGLE's N draft rows, go
        through it.
        """

    @abstractmethod
    def unrolled_hidden(
        self,
        features: Tensor,  # [B, S, F*H]
        input_ids: Tensor,  # [B, S] int64
        positions: Tensor,  # [B, M] int64 of the anchors, at least 1; -1 for none
        targets: Tensor,  # [B, M, U] int64, the tokens after each anchor
    ) -> Tensor:
        """Hidden states [B*M, min(D, U), H] of the rows along the true continuations.

        Row u has read the context before the anchor, the anchor and the first u targets, and
        predicts target u: what as many incremental passes compute. Rows of a missing anchor, and
        rows after the end of a sequence, hold finite values that mean nothing.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]."""
        return F.linear(hidden, self.lm_head)

    def best_children(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """hidden [..., H] -> the best tokens [..., width] and their log-probabilities, best first."""
        logits = self.logits(hidden).float()
        top, tokens = logits.topk(width, dim=-1)
        best = top[..., :1]
        # By hand, because the best is known: engines spend several passes on a log-sum-exp.
        return tokens, top - best - (logits - best).exp().sum(-1, keepdim=True).log()

    def _common_tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        return {
            "features": (("B", "A", self.config.feature_size), torch.float32),
            "query_indices": (("B", "Q"), torch.int64),
            "states": (("B", "N", self.config.hidden_size), torch.float32),
        }


def pick(rows: Tensor, indices: Tensor) -> Tensor:
    """rows [B, R, W], indices [B, Q] int64 -> [B, Q, W]."""
    return rows.gather(1, indices.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def root_indices(positions: Tensor) -> Tensor:
    """Where anchors' roots are in the context: just before them. A missing anchor gets the first row."""
    return (positions - 1).clamp(min=0)


def causal_mask(last: Tensor, length: int) -> Tensor:
    """[B, M] int64 -> [B, 1, M, length] bool: every query sees the rows up to its own."""
    columns = torch.arange(length, device=last.device)
    return (columns <= last.unsqueeze(-1)).unsqueeze(1)
