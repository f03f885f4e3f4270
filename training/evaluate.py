"""How good a draft head is on held-out text: tokens per verify step, as a decoder would get them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.head_types import AUTOREGRESSIVE, MEASURED_NODES, PARALLEL
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from runtime.core.lattice import Lattice
from runtime.core.prefix_search import prefix_search
from runtime.core.token_tree import TokenTree
from training.batches import SampledBatch
from training.features import FeatureSource
from training.heads import anchor_hidden

# Of a parallel head: nodes of a tree, and labels of a frame, as many as an exported head has unless told.
NUM_NODES, TOP_K = MEASURED_NODES, 16


@dataclass(frozen=True)
class Evaluation:
    """What drafting along held-out text gave.

    tokens_per_step: 1 + accepted drafts, averaged over the steps: of a parallel head with trees of
        NUM_NODES nodes, of an autoregressive head with its one best draft
    log_probs, accepted: of every node of every tree but the root: its log prefix probability, and
        whether it is on the accepted path
    """

    tokens_per_step: float
    num_steps: int
    num_sequences: int
    log_probs: NDArray[np.float64]
    accepted: NDArray[np.bool_]


@torch.no_grad()
def evaluate(source: FeatureSource, head: Drafter, batches: list[SampledBatch]) -> Evaluation:
    """Draft with the runtime's own search at the positions where a decoder's steps would start.

    batches: every position of the continuations as an anchor, in order (``all_anchors``)
    """
    emitted, steps, sequences = 0, 0, 0
    log_probs: list[NDArray[np.float64]] = [np.zeros(0)]
    accepted: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    depth = head.config.num_frames
    for sampled in batches:
        anchors = sampled.anchors(depth, depth)
        features = source(sampled.batch)
        trees = TREES[head.config.family](head, features, sampled, anchors.anchor_ids.flatten())
        num_sequences, num_anchors = sampled.positions.shape
        sequences += num_sequences
        for sequence in range(num_sequences):
            column, count = 0, int((sampled.positions[sequence] >= 0).sum())
            while column < count:
                following = anchors.targets[sequence, column, : int(anchors.lengths[sequence, column])]
                tree = trees(sequence * num_anchors + column)
                path = accepted_path(tree, following.tolist())
                emitted += len(path)
                steps += 1
                column += len(path)
                log_probs.append(tree.log_probs[1:])
                accepted.append(np.isin(np.arange(1, len(tree)), path))
    return Evaluation(
        emitted / max(steps, 1), steps, sequences, np.concatenate(log_probs), np.concatenate(accepted)
    )


def accepted_path(tree: TokenTree, following: list[int]) -> list[int]:
    """Nodes of the longest path, from the root, that spells a start of the ``following`` tokens."""
    tokens = iter([*following, -1])
    path, _ = tree.walk(lambda node: next(tokens))
    return path.tolist()


def _searched_trees(
    head: ParallelDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int], TokenTree]:
    arrays = lattice_tensors(
        head,
        anchor_hidden(head, features, sampled.anchors(head.config.num_frames, 1)),
        anchor_ids,
        width=min(TOP_K, head.config.vocab_size),
    ).arrays()

    def tree(at: int) -> TokenTree:
        own = {name: array[at] for name, array in arrays.items()}
        lattice = Lattice.of_outputs(own, merges_repeats=head.config.merges_repeats)
        return prefix_search(lattice, root_token=int(anchor_ids[at]), num_nodes=NUM_NODES)

    return tree


def _greedy_drafts(
    head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int], TokenTree]:
    """The best draft of every anchor, because a whole tree would take as many passes as it has levels.

    The passes follow the text, which is the head's own draft up to its first mistake; the rest of a draft
    is not accepted.
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


# Of every family: a function that makes the tree of an anchor, given its place among the batch's B*M.
TREES: dict[str, Callable[..., Callable[[int], TokenTree]]] = {
    PARALLEL: _searched_trees,
    AUTOREGRESSIVE: _greedy_drafts,
}
