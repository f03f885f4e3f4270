"""What PyTorch says: the model's own forward pass on random prompts and trees.

Trees are evaluated one leaf's path a row through the model's stock causal attention, so that the graph's
mask, positions and cache are checked against something that has none of them. Rows are padded on
the right, where no token before the padding can see it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.parallel import ParallelDrafter
from export.source import Source

PROMPT_LENGTH = 21
# Node 0 is the anchor; a parent comes before its children.
TREE_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 6])


@dataclass(frozen=True)
class BackboneReference:
    """Inputs and expected outputs of one prefill and two tree steps.

    prompt: [P] int64; trees: [2, N] int64 node tokens
    prefill_logits [V], prefill_features [P, F*H]; tree_logits [2, N, V], tree_features [2, N, F*H]
    paths: after the first tree these nodes are committed before the second
    """

    prompt: NDArray[np.int64]
    trees: NDArray[np.int64]
    path: NDArray[np.int64]
    prefill_logits: NDArray[np.float32]
    prefill_features: NDArray[np.float32]
    tree_logits: NDArray[np.float32]
    tree_features: NDArray[np.float32]


@dataclass(frozen=True)
class FrameReference:
    """Context features [P, F*H] in two portions, anchors, and the lattice after each portion, by output.

    The second lattice is of the first frames only, where the head can leave some out.
    """

    features: NDArray[np.float32]
    split: int
    anchors: NDArray[np.int64]
    lattices: tuple[dict[str, NDArray[np.generic]], ...]


def ancestors(node: int, parents: NDArray[np.int64] = TREE_PARENTS) -> list[int]:
    """Nodes from the anchor to ``node``, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


@torch.no_grad()
def backbone_reference(source: Source, seed: int = 0) -> BackboneReference:
    """Run the model itself: the prompt, then every leaf's path of two trees as a sequence of its own."""
    random = np.random.default_rng(seed)
    vocab = source.spec.vocab_size
    prompt = random.integers(0, vocab, PROMPT_LENGTH)
    trees = random.integers(0, vocab, (2, TREE_PARENTS.size))
    source.model.set_attn_implementation("sdpa")
    tap = FeatureTap(source.model, source.layer_ids)

    def run(rows: list[list[int]], start: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits [R, L - start, V] and features [R, L - start, F*H] of sequences, from a position on."""
        longest = max(len(row) for row in rows)
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        logits = source.model(padded, use_cache=False, logits_to_keep=longest - start).logits
        return logits.numpy(), tap.take()[:, start:].numpy()

    prefill_logits, prefill_features = run([prompt.tolist()], 0)
    path = np.array(ancestors(TREE_PARENTS.size - 1))
    prefixes = [prompt.tolist(), [*prompt.tolist(), *trees[0][path].tolist()]]
    paths = [ancestors(node) for node in range(TREE_PARENTS.size) if node not in TREE_PARENTS]
    # Where each node is computed: a path through it, and its place there.
    row_of, column_of = np.zeros_like(TREE_PARENTS), np.zeros_like(TREE_PARENTS)
    for row, nodes in enumerate(paths):
        row_of[nodes], column_of[nodes] = row, np.arange(len(nodes))
    tree_logits, tree_features = [], []
    for tree, prefix in zip(trees, prefixes, strict=True):
        logits, features = run([[*prefix, *tree[nodes].tolist()] for nodes in paths], len(prefix))
        tree_logits.append(logits[row_of, column_of])
        tree_features.append(features[row_of, column_of])
    tap.remove()
    return BackboneReference(
        prompt,
        trees,
        path,
        prefill_logits[0, -1],
        prefill_features[0],
        np.array(tree_logits),
        np.array(tree_features),
    )


@torch.no_grad()
def parallel_reference(
    drafter: ParallelDrafter,
    features: NDArray[np.float32],
    *,
    width: int,
    seed: int = 0,
) -> FrameReference:
    """Run the head without a cache on a context [P, F*H], whole and cut short."""
    config = drafter.config
    split = features.shape[0] - 3
    anchors = np.random.default_rng(seed).integers(0, config.vocab_size, 2)
    counts = (config.num_frames, -(-config.num_frames // 2) if config.num_layers else config.num_frames)
    lattices = []
    for anchor, length, count in zip(anchors, (split, features.shape[0]), counts, strict=True):
        frames = torch.arange(length, length + count)[None]
        mask = torch.ones(1, 1, count, length + count, dtype=torch.bool)
        context, anchor_ids = torch.from_numpy(features[:length])[None], torch.tensor([[anchor]])
        hidden = drafter(context, torch.arange(length)[None], anchor_ids, frames, mask)
        lattice = lattice_tensors(drafter, hidden, anchor_ids[0], width=width)
        lattices.append({name: tensor[0].numpy() for name, tensor in lattice.present().items()})
    return FrameReference(features, split, anchors, tuple(lattices))
