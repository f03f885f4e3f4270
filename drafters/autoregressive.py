"""The base class of autoregressive drafters, which draft level after level of the tree.

Every node of the tree has a state. Its hidden state is computed from its parent's state and its own
token, and gives the log-probabilities of its children. The root's parent is the context: the target
model's features of the tokens before the anchor.

One forward pass reads new context tokens, nodes, or both. The first pass of a step reads the context and
computes the root; every later pass reads one level of nodes and no context. All heads read the first
three of these inputs, and heads with an attention layer (one, as in both papers) the next two:

    features              [B, A, F*H]   float  target model's hidden states of new context tokens
    query_indices         [B, Q]        int64  which of the A context tokens are roots to draft from
    states                [B, N, H]     float  states of the parents of N nodes
    context_position_ids  [B, A]        int64
    attn_mask             [B, 1, P, S]  bool   EAGLE; [B, 1, Q, S] Hydra; S: keys of the pass or the cache
    context_token_ids     [B, A]        int64  EAGLE: of each context token, the token after it
    token_ids             [B, N]        int64  EAGLE: tokens of the nodes
    position_ids          [B, N]        int64  EAGLE: of the nodes; the root has the last context position
    path_ids_d            [B, M_d, d+1] int64  Hydra, every depth d: the tokens from the anchor to a node
    ->
    hidden                [B, M, H]     float  the input of ``logits`` and ``best_children``
    states                [B, P, H]     float  the states that the children's pass reads

EAGLE computes P = Q + N hidden states, those of the roots and of the nodes, each with a state of its own:
M = P. Hydra computes one for every path, M = M_0 + ... + M_(D-1), and they share one state: P = 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import Drafter
from drafters.config import DrafterConfig
from drafters.layers import AttentionFunction, KeyValueCache, RMSNorm, scaled_dot_product

# Sizes, and the names of axes whose size differs from pass to pass.
Shape = tuple[int | str, ...]


class AutoregressiveDrafter(Drafter, ABC):
    """Base of the autoregressive heads. ``num_frames`` is the depth D they draft to.

    heads_per_depth: whether every depth has a head of its own and all nodes share one state
    """

    heads_per_depth = False

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def tensors(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """The inputs in the module's table that this head reads: shape and dtype by name."""
        return {
            "features": (("B", "A", self.config.feature_size), torch.float32),
            "query_indices": (("B", "Q"), torch.int64),
            "states": (("B", "N", self.config.hidden_size), torch.float32),
        }

    @abstractmethod
    def forward(
        self,
        inputs: Mapping[str, Tensor],
        *,
        cache: KeyValueCache | None = None,
        attend: AttentionFunction = scaled_dot_product,
    ) -> tuple[Tensor, Tensor]:
        """One pass: hidden, states.

        With a ``cache``, the keys and values of the A context tokens, and after them of EAGLE's N nodes,
        are kept in it.
        """

    @abstractmethod
    def unrolled_hidden(
        self,
        features: Tensor,  # [B, S, F*H]
        input_ids: Tensor,  # [B, S] int64
        positions: Tensor,  # [B, M] int64 of the anchors, at least 1; -1 for none
        targets: Tensor,  # [B, M, U] int64, the tokens after each anchor
    ) -> Tensor:
        """Hidden states [B*M, min(D, U), H] along the true continuations, as incremental passes give them.

        Hidden state u has read the context before the anchor, the anchor and the first u targets, and
        predicts target u. Those of a missing anchor, and those after the end of a sequence, are finite
        and mean nothing.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., L]."""
        return F.linear(hidden, self.draft_lm_head)

    def best_children(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """hidden [..., H] -> the best tokens [..., width] and their log-probabilities, best first."""
        logits = self.logits(hidden).float()
        top, labels = logits.topk(width, dim=-1)
        best = top[..., :1]
        # Written out, because the largest logit is known: engines spend several passes on a log-sum-exp.
        return self.token_ids(labels), top - best - (logits - best).exp().sum(-1, keepdim=True).log()


def root_indices(positions: Tensor) -> Tensor:
    """The context token before each anchor, which is its root; the first one for a missing anchor."""
    return (positions - 1).clamp(min=0)


def causal_mask(last: Tensor, length: int) -> Tensor:
    """[B, M] int64 -> [B, 1, M, length] bool: a query sees the positions up to its own."""
    columns = torch.arange(length, device=last.device)
    return (columns <= last.unsqueeze(-1)).unsqueeze(1)
