"""Draft heads in training: how heads of each family are scored, and several heads trained with one pass.

``FAMILY_TRAINING`` has one record for each family to which a type of heads belongs. The family ``streaming``
has none, because a head gets it only at its export: heads of streams are trained as parallel heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.head_types import AUTOREGRESSIVE, MEASURED_NODES, PARALLEL
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from drafters.streaming import StreamFrames
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from training.data.batches import AnchorBatch, SampledBatch, select_layers
from training.head_config import HeadConfig
from training.losses import (
    Loss,
    Scores,
    cross_entropy_loss,
    ctc_loss,
    frames_and_auxiliary_loss,
    prefix_ctc_loss,
    streams_loss,
)
from training.scores import SoftTargets, Targets, autoregressive_scores, parallel_scores

# The trees of a parallel head in an evaluation: their nodes, and the labels of a frame that the search reads.
# They are the defaults of an exported head.
NUM_NODES, TOP_K = MEASURED_NODES, 16


@dataclass(frozen=True)
class FamilyTraining:
    """How training scores and evaluates the heads of one family.

    hidden: (head, features [B, S, F*H], sampled, anchors) -> the hidden states of all anchors, [B*M, T, H],
        and an auxiliary loss, a scalar, which is added to the loss of the scores
    scores: (head, hidden [R, T, H], targets, soft targets or None) -> the scores of the R real anchors
    trees: (head, features [B, S, F*H], sampled, anchor_ids [B*M]) -> a function that makes the draft tree of
        an anchor, given the anchor's index among the B*M
    """

    hidden: Callable[[Any, Tensor, SampledBatch, AnchorBatch], tuple[Tensor, Tensor | float]]
    scores: Callable[[Any, Tensor, Targets, SoftTargets | None], Scores]
    trees: Callable[[Any, Tensor, SampledBatch, Tensor], Callable[[int], TokenTree]]


def anchor_hidden(head: ParallelDrafter, features: Tensor, anchors: AnchorBatch) -> Tensor:
    """Hidden states [B*M, T, H] of every anchor's frames."""
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    hidden: Tensor = head(
        features, positions, anchors.anchor_ids, anchors.frame_position_ids, anchors.attn_mask
    )
    return hidden.unflatten(1, (-1, head.config.num_frames)).flatten(0, 1)


def _parallel_hidden(
    head: ParallelDrafter, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> tuple[Tensor, Tensor | float]:
    if isinstance(head, StreamFrames):
        return frames_and_auxiliary_loss(head, features, sampled, anchors)
    return anchor_hidden(head, features, anchors), 0.0


def _searched_trees(
    head: ParallelDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int], TokenTree]:
    """The tree that prefix search finds in every anchor's lattice."""
    arrays = lattice_tensors(
        head,
        anchor_hidden(head, features, sampled.anchors(head.config.num_frames, 1)),
        anchor_ids,
        width=min(TOP_K, head.config.label_count),
    ).arrays()

    def tree(at: int) -> TokenTree:
        own = {name: array[at] for name, array in arrays.items()}
        lattice = Lattice.of_outputs(own, merges_repeats=head.config.merges_repeats)
        return prefix_search(lattice, root_token=int(anchor_ids[at]), num_nodes=NUM_NODES)

    return tree


def _unrolled_hidden(
    head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> tuple[Tensor, Tensor | float]:
    return head.unrolled_hidden(features, sampled.batch.input_ids, sampled.positions, anchors.targets), 0.0


def _greedy_drafts(
    head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int], TokenTree]:
    """The best draft of every anchor. A whole tree would take one pass for each of its levels.

    The passes read the tokens of the text. Up to its first mistake the head's own draft equals the text, and
    after the mistake no token of a draft is accepted.
    """
    targets = sampled.anchors(1, head.config.num_frames).targets
    hidden = head.unrolled_hidden(features, sampled.batch.input_ids, sampled.positions, targets)
    tokens, log_probs = (part.squeeze(-1).cpu().numpy() for part in head.best_children(hidden, 1))
    text = targets.flatten(0, 1)[:, : tokens.shape[1]].cpu().numpy()

    def tree(at: int) -> TokenTree:
        right = (tokens[at] == text[at]).cumprod()
        count = min(int(right.sum()) + 1, tokens.shape[1])
        nodes = np.arange(count + 1)
        return TokenTree(
            np.concatenate([[int(anchor_ids[at])], tokens[at, :count]]),
            nodes - 1,
            nodes,
            np.concatenate([[0.0], log_probs[at, :count].cumsum(dtype=np.float64)]),
        )

    return tree


FAMILY_TRAINING = {
    PARALLEL: FamilyTraining(_parallel_hidden, parallel_scores, _searched_trees),
    AUTOREGRESSIVE: FamilyTraining(_unrolled_hidden, autoregressive_scores, _greedy_drafts),
}

# The values of ``loss``.
LOSSES: dict[str, Loss] = {
    "prefix": prefix_ctc_loss,
    "ctc": ctc_loss,
    "ce": cross_entropy_loss,
    "streams": streams_loss,
}


class HeadSet(nn.Module):
    """The heads of a run, which read the same features of the target model.

    They share no parameter, so the sum of their losses trains each head as if it were alone.

    teacher: a function from the output of the target model's last layer [..., H] to its logits [..., V]; soft
        labels need it
    """

    def __init__(
        self,
        heads: list[Drafter],
        settings: tuple[HeadConfig, ...],
        teacher: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.settings = settings
        self._teacher = teacher

    @property
    def drafters(self) -> list[Drafter]:
        """The heads, in the order of their settings."""
        return [head for head in self.heads if isinstance(head, Drafter)]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers of the target model whose features ``forward`` needs."""
        layers = {layer for head in self.drafters for layer in head.config.target_layer_ids}
        if self._needs_teacher:
            layers.add(self.drafters[0].config.base_num_layers - 1)
        return tuple(sorted(layers))

    @property
    def _needs_teacher(self) -> bool:
        return any(settings.soft_labels > 0 for settings in self.settings)

    def forward(self, features: Tensor, sampled: SampledBatch) -> Tensor:
        """features [B, S, F*H] of ``layer_ids`` -> every head's mean loss over the real anchors, [heads]."""
        taught = self._taught(features, sampled) if self._needs_teacher else None
        losses = []
        for head, settings in zip(self.drafters, self.settings, strict=True):
            num_labels = settings.num_labels
            anchors = sampled.anchors(head.config.num_frames, num_labels)
            tokens = anchors.targets.flatten(0, 1)
            labels = head.label_ids(tokens)
            # A draft ends before a token that it cannot have.
            lengths = torch.minimum(anchors.lengths.flatten(), (labels >= 0).long().cumprod(1).sum(1))
            real = lengths > 0
            previous_ids = torch.cat((anchors.anchor_ids.flatten().unsqueeze(1), tokens), dim=1)
            targets = Targets(previous_ids[real], labels[real].clamp(min=0), lengths[real])
            soft = None
            if settings.soft_labels > 0 and taught is not None:
                probs, rows = taught
                if head.draft_token_ids is not None:
                    probs = probs[:, head.draft_token_ids]
                    probs = probs / probs.sum(-1, keepdim=True).clamp(min=torch.finfo(probs.dtype).tiny)
                soft = SoftTargets(probs, rows[real, :num_labels], settings.soft_labels)
            family = FAMILY_TRAINING[head.config.family]
            own = select_layers(features, self.layer_ids, head.config.target_layer_ids)
            hidden, auxiliary_loss = family.hidden(head, own, sampled, anchors)
            scores = family.scores(head, hidden[real], targets, soft)
            loss = LOSSES[settings.loss](scores, targets.labels, targets.lengths)
            # With a small draft vocabulary a batch may have no real anchor, and a mean of none is no number.
            losses.append(loss.sum() / max(1, loss.numel()) + auxiliary_loss)
        return torch.stack(losses)

    @torch.no_grad()
    def _taught(self, features: Tensor, sampled: SampledBatch) -> tuple[Tensor, Tensor]:
        """The target model's distributions for the targets, [N, V], and the row of each target, [B*M, U].

        Near anchors share targets, and some tokens of a long sequence are no target of any anchor. So N is at
        most the number of targets, and at most the number of tokens.
        """
        num_labels = max(settings.num_labels for settings in self.settings if settings.soft_labels > 0)
        sequences, length = features.shape[:2]
        # A target is predicted from the token before it.
        steps = torch.arange(num_labels, device=features.device)
        at = (sampled.positions.clamp(min=0).unsqueeze(-1) + steps).clamp(max=length - 1)  # [B, M, U]
        starts = length * torch.arange(sequences, device=features.device)
        used, rows = (at + starts[:, None, None]).flatten(0, 1).unique(return_inverse=True)
        last = features[..., -self.drafters[0].config.hidden_size :]
        probs = self._teacher(last.flatten(0, 1)[used]).softmax(-1)
        device = features.device.type
        if torch.is_autocast_enabled(device):
            # The products that follow are in this type. With float32 there would be a second copy.
            probs = probs.to(torch.get_autocast_dtype(device))
        return probs, rows
