"""How good a draft head is on held-out text: tokens per verify step, walked as a decoder would."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.autoregressive import AutoregressiveDrafter
from drafters.base import Drafter
from drafters.head_types import AUTOREGRESSIVE, PARALLEL
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from runtime.trees.lattice import Lattice
from runtime.trees.prefix_search import prefix_search
from runtime.trees.token_tree import TokenTree
from training.batches import SampledBatch
from training.features import FeatureSource
from training.heads import anchor_hidden

# Of the trees that are searched, and of the tables they are searched in: what ``export`` builds unless told.
NUM_NODES = 16
TOP_K = 16


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
    log_probs: NDArray[np.float64]
    accepted: NDArray[np.bool_]


@torch.no_grad()
def evaluate(source: FeatureSource, head: Drafter, batches: list[SampledBatch]) -> Evaluation:
    """Draft with the runtime's own search where a decoder's steps would start.

    batches: every position of the continuations as an anchor, in order
    """
    emitted, steps = 0, 0
    log_probs: list[NDArray[np.float64]] = [np.zeros(0)]
    accepted: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    depth = head.config.num_frames
    for sampled in batches:
        anchors = sampled.anchors(depth, depth)
        features = source(sampled.batch)
        trees = TREES[head.config.family](head, features, sampled, anchors.anchor_ids)
        for row in range(sampled.positions.shape[0]):
            column, count = 0, int((sampled.positions[row] >= 0).sum())
            while column < count:
                following = anchors.targets[row, column, : int(anchors.lengths[row, column])].tolist()
                tree = trees(row, column)
                path = accepted_path(tree, following)
                emitted += len(path)
                steps += 1
                column += len(path)
                log_probs.append(tree.log_probs[1:])
                accepted.append(np.isin(np.arange(1, len(tree)), path))
    return Evaluation(emitted / max(steps, 1), steps, np.concatenate(log_probs), np.concatenate(accepted))


def accepted_path(tree: TokenTree, following: list[int]) -> list[int]:
    """Nodes of the longest path, from the root, that spells a start of the ``following`` tokens."""
    tokens = iter([*following, -1])
    path, _ = tree.walk(lambda node: next(tokens))
    return path.tolist()


def _searched_trees(
    head: ParallelDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int, int], TokenTree]:
    columns = anchor_ids.shape[1]
    found = lattice_tensors(
        head,
        anchor_hidden(head, features, sampled.anchors(head.config.num_frames, 1)),
        anchor_ids.flatten(),
        width=min(TOP_K, head.config.vocab_size),
    )
    # Autocast leaves some in bfloat16, which numpy lacks.
    arrays = {
        name: (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()
        for name, tensor in found.present().items()
    }

    def tree(row: int, column: int) -> TokenTree:
        at = row * columns + column
        own = {name: array[at] for name, array in arrays.items()}
        lattice = Lattice.of_outputs(own, merges_repeats=head.config.merges_repeats)
        return prefix_search(lattice, root_token=int(anchor_ids[row, column]), num_nodes=NUM_NODES)

    return tree


def _greedy_drafts(
    head: AutoregressiveDrafter, features: Tensor, sampled: SampledBatch, anchor_ids: Tensor
) -> Callable[[int, int], TokenTree]:
    """One draft an anchor: a whole tree takes as many passes as it has levels.

    The passes are forced along the text, which is the head's own draft up to its first mistake; no
    more of it matters.
    """
    columns = anchor_ids.shape[1]
    targets = sampled.anchors(1, head.config.num_frames).targets
    hidden = head.unrolled_hidden(features, sampled.batch.input_ids, sampled.positions, targets)
    tokens, log_probs = (part.squeeze(-1).cpu().numpy() for part in head.best_children(hidden, 1))

    def tree(row: int, column: int) -> TokenTree:
        at = row * columns + column
        right = (tokens[at] == targets[row, column, : tokens.shape[1]].cpu().numpy()).cumprod()
        count = min(int(right.sum()) + 1, tokens.shape[1])
        nodes = np.arange(count + 1)
        return TokenTree(
            np.concatenate([[int(anchor_ids[row, column])], tokens[at, :count]]),
            nodes - 1,
            nodes,
            np.concatenate([[0.0], log_probs[at, :count].cumsum(dtype=np.float64)]),
        )

    return tree


# Of every family: what makes the tree of an anchor (row, column) when it is asked for.
TREES: dict[str, Callable[..., Callable[[int, int], TokenTree]]] = {
    PARALLEL: _searched_trees,
    AUTOREGRESSIVE: _greedy_drafts,
}
