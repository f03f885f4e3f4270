"""What a parallel head computes in every engine: the beginning of its frames, and the drafts that they make.

An engine adds the layers between the two, with its own cache and attention, and it shares the target model's
embedding and LM head. All shapes are fixed, so that a CUDA graph can capture a pass.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.attention import FusedStart
from drafters.config import DrafterConfig
from drafters.features import ContextProjection
from drafters.lattice import LatticeTensors, chain_search, lattice_tensors
from drafters.layers import RMSNorm, RotaryEmbedding
from drafters.tree_search import TreeTensors, search

# (tokens, width, name) -> a module that looks up vectors of tokens
EmbeddingFactory = Callable[[int, int, str], nn.Module]


def plain_embedding(tokens: int, width: int, name: str) -> nn.Module:
    """An embedding that every device has whole."""
    return nn.Embedding(tokens, width)


class Tables(nn.Module):
    """The transition of ``drafters.transition``, with the labels' vectors that the export has tabulated."""

    def __init__(self, config: DrafterConfig, make_embedding: EmbeddingFactory):
        super().__init__()
        size = config.transition_size
        self.previous = make_embedding(config.vocab_size, size, "previous")
        self.following = make_embedding(config.vocab_size, size, "following")
        self.frame = nn.Linear(config.hidden_size, size, bias=False) if config.transition == "mlp" else None
        self.blank = nn.Parameter(torch.zeros(size), requires_grad=False) if config.has_blank else None

    def of_frames(self, hidden: Tensor) -> Tensor | None:
        """As ``Transition.of_frames``, in float32."""
        return None if self.frame is None else self.frame(hidden).float()

    def of_previous(self, label_ids: Tensor, embed_tokens: object) -> Tensor:
        """As ``Transition.of_previous``, in float32."""
        return self._look_up(self.previous, label_ids)

    def of_following(self, label_ids: Tensor, lm_head: object) -> Tensor:
        """As ``Transition.of_following``, in float32."""
        vectors = self._look_up(self.following, label_ids)
        if self.blank is None:
            return vectors
        blank = self.blank.float().expand(*vectors.shape[:-2], 1, -1)
        return torch.cat((vectors, blank), dim=-2)

    def _look_up(self, table: nn.Module, label_ids: Tensor) -> Tensor:
        found: Tensor = table(label_ids.flatten())
        return found.view(*label_ids.shape, -1).float()


class HeadParts(nn.Module):
    """The parts of a ``ctc`` or ``block`` head beside its layers.

    They have the names of a draft directory's weights.

    make_embedding: makes the tables of a transition, which an engine may split among devices
    """

    def __init__(self, config: DrafterConfig, make_embedding: EmbeddingFactory = plain_embedding):
        super().__init__()
        hidden = config.hidden_size
        self.head_config = config
        self.context = ContextProjection(config)
        self.start = FusedStart(config) if config.frame_start == "fused" else None
        self.frame_queries = nn.Parameter(torch.zeros(config.num_frames, hidden), requires_grad=False)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.blank = nn.Linear(hidden, 1) if config.has_blank else None
        size = config.draft_vocab_size
        self.draft_token_ids = None if size is None else nn.Parameter(torch.arange(size), requires_grad=False)
        self.tables = Tables(config, make_embedding) if config.transition != "none" else None

    def begin(self, anchors: Tensor, last: Tensor | None, count: int) -> Tensor:
        """What the first ``count`` frames of R sequences begin as, [R, count, H].

        anchors: [R, H], embedded; last: [R, H], the projected context token before each anchor, which only
            ``fused`` frames read
        """
        if self.start is None:
            starts = F.pad(anchors.unsqueeze(1), (0, 0, 0, count - 1))
        else:
            assert last is not None
            starts = self.start(anchors.unsqueeze(0), last.unsqueeze(0), count).squeeze(0)
        return (starts + self.frame_queries[:count]).to(anchors.dtype)

    def chains(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        token_logits: Callable[[Tensor], Tensor],
        *,
        top_k: int,
        num_drafts: int,
    ) -> Tensor:
        """The chains of drafts [R, N] int64 of the frames' hidden states [R, T, H].

        anchor_ids: [R] int64; token_logits: the target model's LM head, [rows, H] -> [rows, V]
        top_k: labels of a frame that the search reads. A frame whose chain has ended repeats its last draft.
        """
        lattice = self._lattice(hidden, anchor_ids, token_logits, top_k)
        merges = self.head_config.merges_repeats
        drafts, _ = chain_search(lattice, merges_repeats=merges, num_drafts=num_drafts)
        return drafts

    def trees(
        self,
        hidden: Tensor,
        anchor_ids: Tensor,
        token_logits: Callable[[Tensor], Tensor],
        *,
        top_k: int,
        num_nodes: int,
    ) -> TreeTensors:
        """The trees of N drafts of the frames' hidden states [R, T, H], with the roots.

        The other arguments are those of ``chains``.
        """
        return search(
            self._lattice(hidden, anchor_ids, token_logits, top_k),
            anchor_ids.unsqueeze(1),
            merges_repeats=self.head_config.merges_repeats,
            num_nodes=num_nodes,
        )

    def _lattice(
        self, hidden: Tensor, anchor_ids: Tensor, token_logits: Callable[[Tensor], Tensor], top_k: int
    ) -> LatticeTensors:
        labels = Labels(self, token_logits)
        return lattice_tensors(cast(Any, labels), hidden, anchor_ids, width=top_k)


class Labels:
    """What ``drafters.lattice.lattice_tensors`` asks of a head, where an engine owns the LM head."""

    embed_tokens = lm_head = None

    def __init__(self, parts: HeadParts, token_logits: Callable[[Tensor], Tensor]):
        self.config, self.blank, self.transition = parts.head_config, parts.blank, parts.tables
        self._drafted, self._token_logits = parts.draft_token_ids, token_logits

    def label_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, T, H] -> [R, T, L]."""
        logits = self._token_logits(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        # The LM head is the target model's, which has the rows of all tokens.
        return logits if self._drafted is None else logits[..., self._drafted]

    def token_ids(self, label_ids: Tensor) -> Tensor:
        """As ``Drafter.token_ids``."""
        return label_ids if self._drafted is None else self._drafted[label_ids]
