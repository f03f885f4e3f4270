"""A built pass with speculative streams against PyTorch, on a random prompt and random token trees.

As for a target model, the reference evaluates every path of a tree as a sequence of its own. The streams
after a node are those that the head computes in training, after the text that ends with this node. So the
graph's masks, positions, cache and pruning are checked against computations without them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafters.features import FeatureTap
from drafters.lattice import lattice_tensors
from drafters.streaming import StreamFrames
from export.errors import ExportError
from export.verify.comparison import TOLERANCES, Tensors, check_labels, of_labels
from export.verify.runner import GraphRunner
from export.verify.target_model import PROMPT_LENGTH, TREE_PARENTS, ancestors_of, prompt_inputs

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
    path: the nodes of the first tree that are committed before the second
    after_prompt: of the prompt's last token; nodes: of every node of both trees
    """

    prompt: NDArray[np.int64]
    trees: NDArray[np.int64]
    path: NDArray[np.int64]
    after_prompt: NodeOutputs
    nodes: tuple[list[NodeOutputs], ...]


@torch.no_grad()
def streaming_reference(head: StreamFrames, *, width: int, seed: int = 0) -> StreamingReference:
    """Run the model and the head on the prompt, and on the path to each node of two trees after it."""
    random = np.random.default_rng(seed)
    vocab = head.config.vocab_size
    prompt = random.integers(0, vocab, PROMPT_LENGTH)
    trees = random.integers(0, vocab, (2, TREE_PARENTS.size))
    head.model.set_attn_implementation("eager")
    tap = FeatureTap(head.model, head.config.target_layer_ids)

    def outputs(sequence: list[int]) -> NodeOutputs:
        logits = head.model(torch.tensor([sequence]), use_cache=False, logits_to_keep=1).logits[:, -1]
        features = tap.take()
        exit_logits = head.exit_logits(features[:, -1])[0].numpy()
        return NodeOutputs(logits[0].numpy(), _lattice(head, features, logits.argmax(-1), width), exit_logits)

    path = np.array(ancestors_of(TREE_PARENTS.size - 1))
    prefixes = [prompt.tolist(), [*prompt.tolist(), *trees[0][path].tolist()]]
    nodes: tuple[list[NodeOutputs], ...] = ([], [])
    for tree, prefix, preferred, found in zip(trees, prefixes, PREFERRED, nodes, strict=True):
        for node in range(tree.size):
            if node in preferred:
                tree[node] = found[TREE_PARENTS[node]].exit_logits.argmax()
            found.append(outputs([*prefix, *tree[ancestors_of(node)].tolist()]))
    after_prompt = outputs(prompt.tolist())
    tap.remove()
    return StreamingReference(prompt, trees, path, after_prompt, nodes)


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
        graph.keep(start, reference.path)
        start += reference.path.size
    return {**found, "equal_argmax": float(np.mean(equal))}


def _run_tree(graph: GraphRunner, tokens: NDArray[np.int64], start: int, kept: int) -> Tensors:
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
