"""Trains several heads with one forward pass: they read the same features of the target model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.head_types import AUTOREGRESSIVE, PARALLEL
from drafters.parallel import ParallelDrafter
from drafters.streaming import StreamFrames
from training.anchors import AnchorBatch
from training.batches import SampledBatch
from training.features import select_layers
from training.head_config import HeadConfig
from training.losses import LOSSES, Scores
from training.scores import SoftTargets, Targets, autoregressive_scores, parallel_scores
from training.stream_losses import frames_and_main_loss


class HeadSet(nn.Module):
    """The heads of a run. They share no parameter, so the sum of their losses trains each as if alone.

    teacher: the target model's logits [..., V] of its last layer's output [..., H], which soft labels need
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
        """The target model's layers that ``forward`` needs the features of."""
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
            real = anchors.lengths.flatten() > 0
            targets = Targets(
                anchors.anchor_ids.flatten()[real],
                anchors.targets.flatten(0, 1)[real],
                anchors.lengths.flatten()[real],
            )
            soft = None
            if settings.soft_labels > 0 and taught is not None:
                probs, rows = taught
                soft = SoftTargets(probs, rows[real, :num_labels], settings.soft_labels)
            hidden_of, scores_of = FAMILIES[head.config.family]
            own = select_layers(features, self.layer_ids, head.config.target_layer_ids)
            beside: Tensor | float = 0.0
            if isinstance(head, StreamFrames):
                hidden, beside = frames_and_main_loss(head, own, sampled, anchors)
            else:
                hidden = hidden_of(head, own, sampled, anchors)
            scores = scores_of(head, hidden[real], targets, soft)
            losses.append(LOSSES[settings.loss](scores, targets.labels, targets.lengths).mean() + beside)
        return torch.stack(losses)

    @torch.no_grad()
    def _taught(self, features: Tensor, sampled: SampledBatch) -> tuple[Tensor, Tensor]:
        """The target model's distributions that targets need, [N, V], and the row of each target, [B*M, U].

        Near anchors share targets, and some tokens of a long sequence are near no anchor, so that N is at
        most the number of targets and at most that of tokens.
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
            # As the products that follow; in float32 there would be two copies.
            probs = probs.to(torch.get_autocast_dtype(device))
        return probs, rows


def anchor_hidden(head: ParallelDrafter, features: Tensor, anchors: AnchorBatch) -> Tensor:
    """Hidden states [B*M, T, H] of every anchor's frames."""
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    hidden: Tensor = head(
        features, positions, anchors.anchor_ids, anchors.frame_position_ids, anchors.attn_mask
    )
    return hidden.unflatten(1, (-1, head.config.num_frames)).flatten(0, 1)


def _parallel_hidden(
    head: ParallelDrafter, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> Tensor:
    return anchor_hidden(head, features, anchors)


def _unrolled_hidden(
    head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> Tensor:
    return head.unrolled_hidden(features, sampled.batch.input_ids, sampled.positions, anchors.targets)


# Of every family: the hidden states of all anchors, and from those of the real ones the targets' scores.
FAMILIES: dict[str, tuple[Callable[..., Tensor], Callable[..., Scores]]] = {
    PARALLEL: (_parallel_hidden, parallel_scores),
    AUTOREGRESSIVE: (_unrolled_hidden, autoregressive_scores),
}
