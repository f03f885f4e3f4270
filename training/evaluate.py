"""How good a draft head is on held-out text: tokens per verify step, simulated."""

from dataclasses import dataclass

import numpy as np
import torch

from drafters.ctc import CTCDrafter
from runtime.ctc import prefix_search
from runtime.lattice import Lattice
from runtime.tree import TokenTree
from training.batches import AnchoredBatch
from training.features import FeatureSource

NUM_NODES = 16
LATTICE_WIDTH = 16


@dataclass(frozen=True)
class Evaluation:
    """tokens_per_step: 1 + accepted drafts, averaged over held-out anchors, with 16-node trees."""

    tokens_per_step: float
    num_anchors: int


@torch.no_grad()
def evaluate(source: FeatureSource, drafter: CTCDrafter, batches: list[AnchoredBatch]) -> Evaluation:
    """Draft at every anchor with the runtime's own search and compare with what really follows.

    Anchors lie uniformly in the text, not where a decoder's steps would start, so this is an
    estimate of beta.
    """
    emitted, count = 0, 0
    frames = drafter.config.num_frames
    for batch in batches:
        anchors = batch.anchors
        logits = drafter_logits(source, drafter, batch)
        log_probs = logits.float().log_softmax(-1).unflatten(1, (-1, frames))  # [B, M, T, V+1]
        top, tokens = log_probs[..., :-1].topk(LATTICE_WIDTH, dim=-1)
        for row, column in torch.nonzero(anchors.lengths).tolist():
            at = (row, column)
            lattice = Lattice(
                tokens[at].cpu().numpy(), top[at].cpu().numpy(), log_probs[at][:, -1].cpu().numpy()
            )
            tree = prefix_search(lattice, anchor=0, num_nodes=NUM_NODES)
            following = anchors.targets[at][: int(anchors.lengths[at])].tolist()
            emitted += 1 + accepted_length(tree, following)
            count += 1
    return Evaluation(emitted / max(count, 1), count)


def accepted_length(tree: TokenTree, following: list[int]) -> int:
    """How many of the ``following`` tokens a path of the tree spells."""
    node = 0
    for depth, token in enumerate(following):
        children = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not children.size:
            return depth
        node = int(children[0])
    return len(following)


def drafter_logits(source: FeatureSource, drafter: torch.nn.Module, batch: AnchoredBatch) -> torch.Tensor:
    """Frame logits [B, M*T, V+1] of every anchor."""
    features = source(batch.batch)
    positions = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
    anchors = batch.anchors
    logits: torch.Tensor = drafter(
        features, positions, anchors.anchor_ids, anchors.frame_position_ids, anchors.attn_mask
    )
    return logits
