"""The losses of speculative streams: of their frames, and of the main stream and the early exit.

A head of speculative streams has an auxiliary loss beside that of its frames. Speculative Streaming (arXiv
2402.11131, equation 5) trains the target model and its streams together:

    - a_0 log p(y_t) - sum over j of a_j log p(y_(t+j)),  a_0 = 1, a_j = 0.1

The sum is the loss ``streams``. The first term, the main stream's loss, is trained in ``shared`` mode only,
because in ``lossless`` mode none of its parameters is trained. The early exit predicts the same token from
the hidden states at layer N - N_s; its gradient reaches only its own adapter.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafters.parallel import last_context
from drafters.streaming import StreamFrames
from training.data.batches import AnchorBatch, SampledBatch
from training.losses.ctc import Scores, own_targets

# The weights a_j of every stream and a_0 of the main stream, and the weight of the early exit.
STREAM_WEIGHT = 0.1
MAIN_WEIGHT = 1.0
EXIT_WEIGHT = 0.1
# The number of logits that are in memory at once; in float32 they take 64 MB.
BLOCK = 1 << 24


def streams_loss(scores: Scores, targets: Tensor, lengths: Tensor) -> Tensor:
    """The loss of speculative streams: frame t predicts target t, and all frames weigh the same."""
    own, _ = own_targets(scores, lengths)
    return -STREAM_WEIGHT * own.sum(-1)


def frames_and_auxiliary_loss(
    head: StreamFrames, features: Tensor, sampled: SampledBatch, anchors: AnchorBatch
) -> tuple[Tensor, Tensor]:
    """The frames of all anchors, [B*M, T, H], and the loss of main stream and early exit, a scalar.

    features [B, S, H]. The loss is the mean over the real anchors and the last token of every sequence. A
    last token is never an anchor, because nothing follows it, but it may be the end of a text.
    """
    frames = head.config.num_frames
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    main, hidden = head.main_and_frames(
        features, positions, anchors.frame_position_ids, anchors.anchor_ids, anchors.attn_mask
    )
    ends = (sampled.ends - 1).unsqueeze(1)
    at = torch.cat((anchors.frame_position_ids[:, ::frames], ends), dim=1)
    real = torch.cat((anchors.lengths > 0, ends > 0), dim=1)
    labels = sampled.batch.input_ids.gather(1, at)[real]

    def mean_loss(logits_of: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
        before = last_context(states, positions, at)
        return _cross_entropy(logits_of, before[real], labels, head.config.vocab_size).mean()

    loss = EXIT_WEIGHT * mean_loss(head.exit_logits, features)
    if head.config.stream_mode == "shared":
        loss = loss + MAIN_WEIGHT * mean_loss(head.main_logits, main)
    return hidden.unflatten(1, (-1, frames)).flatten(0, 1), loss


def _cross_entropy(
    logits_of: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, vocab_size: int
) -> Tensor:
    """hidden [R, H], labels [R] -> [R]. The gradient computes the logits again, so they are not kept."""

    def block(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(hidden).float(), labels, reduction="none")

    rows = max(1, BLOCK // vocab_size)
    parts = zip(hidden.split(rows), labels.split(rows), strict=True)
    return torch.cat([checkpoint(block, *part, use_reentrant=False) for part in parts])
