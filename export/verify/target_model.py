"""Built passes of a target model against PyTorch, on a random prompt and random token trees.

The reference evaluates every path of a tree from the root to a leaf as a sequence of its own, with the
model's stock causal attention. So the graph's mask, positions and cache are checked against a computation
without them. Sequences are padded on the right, where no earlier token sees the padding.

With speculative streams, those after a node are compared with the streams that the head computes in
training, after the text that ends with this node: so pruning is checked too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.streaming import StreamFrames
from export.errors import ExportError
from export.source import Source
from export.verify.comparison import TOLERANCES, Tensors, check_labels, of_labels
from export.verify.runner import GraphRunner

PROMPT_LENGTH = 21
# Node 0 is the root; a parent comes before its children.
TREE_PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, 6])


def ancestors_of(node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    return [] if node < 0 else [*ancestors_of(int(TREE_PARENTS[node])), node]


# The nodes of the first tree that are committed before the second.
PATH = np.array(ancestors_of(TREE_PARENTS.size - 1))


@dataclass(frozen=True)
class TargetModelReference:
    """Inputs and expected outputs of one prefill and two tree steps.

    prompt [P] int64; trees [2, N] int64, the tokens of the nodes
    prefill_logits [V], prefill_features [P, F*H]; tree_logits [2, N, V], tree_features [2, N, F*H]
    """

    prompt: NDArray[np.int64]
    trees: NDArray[np.int64]
    prefill_logits: NDArray[np.float32]
    prefill_features: NDArray[np.float32]
    tree_logits: NDArray[np.float32]
    tree_features: NDArray[np.float32]


def _random_texts(
    vocab: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], tuple[list[int], list[int]]]:
    """A prompt [P], two trees [2, N], and the text before each tree."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, vocab, PROMPT_LENGTH)
    trees = random.integers(0, vocab, (2, TREE_PARENTS.size))
    return prompt, trees, (prompt.tolist(), [*prompt.tolist(), *trees[0][PATH].tolist()])


@torch.no_grad()
def target_model_reference(source: Source, seed: int = 0) -> TargetModelReference:
    """Run the model itself on the prompt, and on each path of two trees after it."""
    prompt, trees, prefixes = _random_texts(source.spec.vocab_size, seed)
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
    for tokens, logits, features in zip(
        reference.trees, reference.tree_logits, reference.tree_features, strict=True
    ):
        outputs = _run_tree(graph, tokens, start, tokens.size)
        if not np.array_equal(outputs["next_tokens"], outputs["logits"].argmax(-1)):
            raise ExportError("target model: next_tokens is not the argmax of logits")
        tree = max(
            tree,
            graph.difference("tree logits", outputs["logits"], logits),
            graph.difference("tree features", outputs["features"], features),
        )
        equal += (outputs["logits"].argmax(-1) == logits.argmax(-1)).tolist()
        graph.keep(start, PATH)
        start += PATH.size
    return {"prefill": prefill, "tree": tree, "equal_argmax": float(np.mean(equal))}


# Nodes that each of the two trees keeps: all, then few. In the second tree the early exit prefers the nodes
# PREFERRED, so that the kept nodes are not simply the first.
KEPT = (TREE_PARENTS.size, 3)
PREFERRED = ((), (2, 5))
# After random tokens a trained stream can be ill-conditioned: in one of 16 places PyTorch's float32 differs
# from its float64 by 6e-4. What is drafted never changes the text.
DRAFT_SLACK = 10


@dataclass(frozen=True)
class NodeOutputs:
    """What is computed for one node: its logits [V], the lattice by name, and its early-exit logits [V]."""

    logits: NDArray[np.float32]
    lattice: Tensors
    exit_logits: NDArray[np.float32]


@dataclass(frozen=True)
class StreamingReference:
    """Inputs and expected outputs of one prefill and two tree steps.

    prompt [P] int64; trees [2, N] int64, the tokens of the nodes
    after_prompt: of the prompt's last token; nodes: of every node of both trees
    """

    prompt: NDArray[np.int64]
    trees: NDArray[np.int64]
    after_prompt: NodeOutputs
    nodes: tuple[list[NodeOutputs], ...]


@torch.no_grad()
def streaming_reference(head: StreamFrames, *, width: int, seed: int = 0) -> StreamingReference:
    """Run the model and the head on the prompt, and on the path to each node of two trees after it."""
    prompt, trees, prefixes = _random_texts(head.config.vocab_size, seed)
    head.model.set_attn_implementation("eager")
    tap = FeatureTap(head.model, head.config.target_layer_ids)

    def outputs(sequence: list[int]) -> NodeOutputs:
        logits = head.model(torch.tensor([sequence]), use_cache=False, logits_to_keep=1).logits[:, -1]
        features = tap.take()
        exit_logits = head.exit_logits(features[:, -1])[0].numpy()
        return NodeOutputs(logits[0].numpy(), _lattice(head, features, logits.argmax(-1), width), exit_logits)

    nodes: tuple[list[NodeOutputs], ...] = ([], [])
    for tree, prefix, preferred, found in zip(trees, prefixes, PREFERRED, nodes, strict=True):
        for node in range(tree.size):
            if node in preferred:
                tree[node] = found[TREE_PARENTS[node]].exit_logits.argmax()
            found.append(outputs([*prefix, *tree[ancestors_of(node)].tolist()]))
    after_prompt = outputs(prompt.tolist())
    tap.remove()
    return StreamingReference(prompt, trees, after_prompt, nodes)


def _lattice(head: StreamFrames, features: Tensor, anchor_ids: Tensor, width: int) -> Tensors:
    """Of the streams of the last position of features [1, L, H]."""
    length, frames = features.shape[1], head.config.num_frames
    mask = torch.ones(1, 1, frames, length + frames, dtype=torch.bool)
    positions = torch.arange(length + frames)[None]
    hidden = head(features, positions[:, :length], anchor_ids[None], positions[:, length:], mask)
    lattice = lattice_tensors(head, hidden, anchor_ids, width=width)
    return {name: array[0] for name, array in lattice.arrays().items()}


def check_streaming(graph: GraphRunner, reference: StreamingReference) -> dict[str, float]:
    """Largest absolute differences of logits and lattices: ``prefill``, ``tree``, and ``pruned``.

    The last is of the second tree, which keeps few nodes. ``equal_argmax`` is the share of positions at which
    graph and reference prefer the same token.
    """
    count = reference.prompt.size
    outputs = graph.run(
        **prompt_inputs(graph, reference.prompt),
        parents=np.zeros(count),
        scored_indices=np.array([0]),
        kept_places=np.arange(count),
        stream_indices=np.array([count - 1]),
    )
    if not np.array_equal(outputs["kept_nodes"], np.arange(count)):
        raise ExportError("streaming: a prompt keeps all its tokens, and the graph drops some")
    found = {"prefill": _difference(graph, "prefill", outputs, [reference.after_prompt])}
    equal = [outputs["logits"][0].argmax() == reference.after_prompt.logits.argmax()]
    start = count
    sizes = zip(("tree", "pruned"), KEPT, reference.trees, reference.nodes, strict=True)
    for name, kept, tokens, expected in sizes:
        outputs = _run_tree(graph, tokens, start, kept)
        nodes = outputs["kept_nodes"]
        _check_kept(graph, nodes, tokens, expected)
        if not np.array_equal(outputs["next_tokens"], outputs["logits"].argmax(-1)):
            raise ExportError("streaming: next_tokens is not the argmax of logits")
        kept_nodes = [expected[node] for node in nodes]
        found[name] = _difference(graph, name, outputs, kept_nodes)
        equal += [
            logits.argmax() == node.logits.argmax()
            for logits, node in zip(outputs["logits"], kept_nodes, strict=True)
        ]
        graph.keep(start, PATH)
        start += PATH.size
    return {**found, "equal_argmax": float(np.mean(equal))}


def _run_tree(graph: GraphRunner, tokens: NDArray[np.int64], start: int, kept: int) -> Tensors:
    """A pass over a tree; what prunes it is for graphs with streams, and others have no such inputs."""
    nodes = np.arange(tokens.size)
    mask = np.zeros((1, tokens.size, graph.capacity), np.bool_)
    mask[..., :start] = True
    for node in nodes:
        mask[0, node, [start + ancestor for ancestor in ancestors_of(node)]] = True
    return graph.run(
        input_ids=tokens,
        position_ids=np.array([start + len(ancestors_of(node)) - 1 for node in nodes]),
        attn_mask=mask,
        write_index=np.array(start),
        logit_indices=nodes,
        parents=TREE_PARENTS,
        scored_indices=nodes,
        kept_places=np.arange(kept),
        stream_indices=np.arange(kept),
    )


def path_scores(
    tokens: NDArray[np.int64], exit_logits: list[NDArray[np.float32]], parents: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Log of the probability [N] that the early exit gives the path to every node."""
    scores = np.zeros(tokens.size)
    for node in range(1, tokens.size):
        logits = exit_logits[parents[node]].astype(np.float64)
        total = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        scores[node] = scores[parents[node]] + logits[tokens[node]] - total
    return scores


def _check_kept(
    graph: GraphRunner, nodes: NDArray[np.int64], tokens: NDArray[np.int64], expected: list[NodeOutputs]
) -> None:
    """Raises ExportError unless these are the best nodes, apart from rounding, and a tree."""
    scores = path_scores(tokens, [node.exit_logits for node in expected], TREE_PARENTS)
    worst = np.sort(scores)[::-1][nodes.size - 1]
    limit = TOLERANCES[graph.activations] * float(np.abs(scores).max())
    is_tree = nodes[0] == 0 and all(TREE_PARENTS[node] in nodes for node in nodes[1:])
    if not is_tree or (np.diff(nodes) <= 0).any() or (scores[nodes] < worst - limit).any():
        raise ExportError(
            f"streaming: of path scores {scores.round(3).tolist()} the graph keeps the nodes {nodes.tolist()}"
        )


def _difference(graph: GraphRunner, name: str, outputs: Tensors, expected: list[NodeOutputs]) -> float:
    largest = graph.difference(
        f"streaming {name} logits", outputs["logits"], np.array([node.logits for node in expected])
    )
    labels = np.array([node.lattice["frame_tokens"] for node in expected])
    same = check_labels(f"streaming {name} frame_tokens", outputs["frame_tokens"], labels, graph.activations)
    for index, node in enumerate(expected):
        for key, values in node.lattice.items():
            # An anchor is the preferred token, which may differ where two are nearly level.
            if key == "frame_tokens" or (
                key == "transition_anchor" and outputs["next_tokens"][index] != node.logits.argmax()
            ):
                continue
            what = f"streaming {name} {key}"
            pair = (of_labels(each, same[index]) for each in (outputs[key][index], values))
            largest = max(largest, graph.difference(what, *pair, slack=DRAFT_SLACK))
    return largest
