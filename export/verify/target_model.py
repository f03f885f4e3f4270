"""A built target model against PyTorch, on a random prompt and random token trees.

The reference evaluates every path of a tree from the root to a leaf as a sequence of its own, with the
model's stock causal attention. So the graph's mask, positions and cache are checked against a computation
without them. Sequences are padded on the right, where no earlier token sees the padding.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.features import FeatureTap
from export.errors import ExportError
from export.source import Source
from export.verify.runner import GraphRunner

PROMPT_LENGTH = 21
# Node 0 is the root; a parent comes before its children.
TREE_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 6])


@dataclass(frozen=True)
class TargetModelReference:
    """Inputs and expected outputs of one prefill and two tree steps.

    prompt [P] int64; trees [2, N] int64, the tokens of the nodes
    path: the nodes of the first tree that are committed before the second
    prefill_logits [V], prefill_features [P, F*H]; tree_logits [2, N, V], tree_features [2, N, F*H]
    """

    prompt: NDArray[np.int64]
    trees: NDArray[np.int64]
    path: NDArray[np.int64]
    prefill_logits: NDArray[np.float32]
    prefill_features: NDArray[np.float32]
    tree_logits: NDArray[np.float32]
    tree_features: NDArray[np.float32]


def ancestors_of(node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [] if node < 0 else [*ancestors_of(int(TREE_PARENTS[node])), node]


@torch.no_grad()
def target_model_reference(source: Source, seed: int = 0) -> TargetModelReference:
    """Run the model itself on the prompt, and on each path of two trees after it."""
    random = np.random.default_rng(seed)
    vocab = source.spec.vocab_size
    prompt = random.integers(0, vocab, PROMPT_LENGTH)
    trees = random.integers(0, vocab, (2, TREE_PARENTS.size))
    # Every model supports this implementation; models with a soft cap support no other.
    source.model.set_attn_implementation("eager")
    tap = FeatureTap(source.model, source.layer_ids)

    def run(sequences: list[list[int]], start: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits [R, L - start, V] and features [R, L - start, F*H] of R sequences, from a position on."""
        longest = max(len(sequence) for sequence in sequences)
        padded = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
        logits = source.model(padded, use_cache=False, logits_to_keep=longest - start).logits
        return logits.numpy(), tap.take()[:, start:].numpy()

    prefill_logits, prefill_features = run([prompt.tolist()], 0)
    path = np.array(ancestors_of(TREE_PARENTS.size - 1))
    prefixes = [prompt.tolist(), [*prompt.tolist(), *trees[0][path].tolist()]]
    paths = [ancestors_of(node) for node in range(TREE_PARENTS.size) if node not in TREE_PARENTS]
    # Which path goes through a node, and the node's place in it.
    path_of, place_of = np.zeros_like(TREE_PARENTS), np.zeros_like(TREE_PARENTS)
    for number, nodes in enumerate(paths):
        path_of[nodes], place_of[nodes] = number, np.arange(len(nodes))
    tree_logits, tree_features = [], []
    for tree, prefix in zip(trees, prefixes, strict=True):
        logits, features = run([[*prefix, *tree[nodes].tolist()] for nodes in paths], len(prefix))
        tree_logits.append(logits[path_of, place_of])
        tree_features.append(features[path_of, place_of])
    tap.remove()
    return TargetModelReference(
        prompt,
        trees,
        path,
        prefill_logits[0, -1],
        prefill_features[0],
        np.array(tree_logits),
        np.array(tree_features),
    )


def prompt_inputs(graph: GraphRunner, prompt: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The inputs of a pass that reads a prompt [P] without those that pick rows."""
    count = prompt.size
    mask = np.zeros((1, count, graph.capacity), np.bool_)
    mask[0, :, :count] = np.tri(count, dtype=np.bool_)
    return {
        "input_ids": prompt,
        "position_ids": np.arange(count),
        "attn_mask": mask,
        "write_index": np.array(0),
    }


def check_target_model(graph: GraphRunner, reference: TargetModelReference) -> dict[str, float]:
    """Largest absolute differences of logits and features: ``prefill`` and ``tree``.

    ``equal_argmax`` is the share of positions at which graph and reference prefer the same token.
    """
    count = reference.prompt.size
    outputs = graph.run(**prompt_inputs(graph, reference.prompt), logit_indices=np.array([count - 1]))
    prefill = max(
        graph.difference("prefill logits", outputs["logits"][0], reference.prefill_logits),
        graph.difference("prefill features", outputs["features"], reference.prefill_features),
    )
    equal = [outputs["logits"][0].argmax() == reference.prefill_logits.argmax()]
    tree, start = 0.0, count
    nodes = np.arange(TREE_PARENTS.size)
    for tokens, logits, features in zip(
        reference.trees, reference.tree_logits, reference.tree_features, strict=True
    ):
        mask = np.zeros((1, nodes.size, graph.capacity), np.bool_)
        mask[..., :start] = True
        for node in nodes:
            mask[0, node, [start + ancestor for ancestor in ancestors_of(node)]] = True
        outputs = graph.run(
            input_ids=tokens,
            position_ids=np.array([start + len(ancestors_of(node)) - 1 for node in nodes]),
            attn_mask=mask,
            write_index=np.array(start),
            logit_indices=nodes,
        )
        if not np.array_equal(outputs["next_tokens"], outputs["logits"].argmax(-1)):
            raise ExportError("target model: next_tokens is not the argmax of logits")
        tree = max(
            tree,
            graph.difference("tree logits", outputs["logits"], logits),
            graph.difference("tree features", outputs["features"], features),
        )
        equal += (outputs["logits"].argmax(-1) == logits.argmax(-1)).tolist()
        graph.keep(start, reference.path)
        start += reference.path.size
    return {"prefill": prefill, "tree": tree, "equal_argmax": float(np.mean(equal))}
