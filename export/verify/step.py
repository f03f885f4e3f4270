"""A step-logic graph against PyTorch, on random inputs such as the other graphs of a step make them."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from export.errors import ExportError
from export.verify.comparison import Tensors, probability_difference, tree_problem
from export.verify.runner import GraphRunner
from runtime.core.bundle import GraphSpec, TensorSpec

# Sizes of the open axes.
NODES = 9
# Nodes of the pass before, and depth of the next one's.
PASS_NODES, NEXT_DEPTH = 2, 2
# States are multiples of this, which every precision has.
STATE_STEP = 1 / 8
# Number of examples that are compared.
EXAMPLES = 8


def random_inputs(contract: GraphSpec, capacity: int, seed: int = 0) -> list[Tensors]:
    """Inputs of one sequence each, with the batch axis, such as the other graphs make them."""
    random = np.random.default_rng(seed)
    return [_example(contract, capacity, random) for _ in range(EXAMPLES)]


def _example(contract: GraphSpec, capacity: int, random: np.random.Generator) -> Tensors:
    path = next((t.shape[1] for t in (*contract.inputs, *contract.outputs) if t.name == "path"), 8)
    assert isinstance(path, int)
    length = int(random.integers(8, capacity - 2 * max(path, NODES)))
    parents = np.array([-1, *(random.integers(0, node) for node in range(1, NODES))])
    if path == 1:
        # A step of plain decoding: a root, and padding.
        parents[:] = -1
    ancestors = np.eye(NODES, dtype=bool)
    for node in np.flatnonzero(parents >= 0):
        while ancestors[parents[node]].sum() >= path:  # no head drafts so deep
            parents[node] = parents[parents[node]]
        ancestors[node] |= ancestors[parents[node]]
    token_ids = random.permutation(NODES)
    children = [np.flatnonzero(parents == node) for node in range(NODES)]
    chosen = np.array([token_ids[random.choice(found)] if found.size else NODES for found in children])
    count = int(random.integers(1, path + 1))
    accepted = np.sort(random.permutation(np.arange(1, NODES))[: count - 1])
    values: Tensors = {
        "lengths": np.array([length]),
        "counts": np.array([random.integers(1, 5)]),
        "positions": np.arange(capacity),
        "anchor_ids": np.array([[5]]),
        "parents": parents[None],
        "depths": ancestors.sum(1)[None] - 1,
        "ancestors": ancestors[None],
        "input_ids": token_ids[None],
        "next_tokens": chosen[None],
        "path": np.array([[0, *accepted, *range(accepted.size + 1, path)]]),
    }
    names = {tensor.name for tensor in contract.inputs}
    if "logits" in names:
        values |= _sampling(contract, random)
    if "frontier_scores" in names:
        values |= _pass_example(contract, random)
    if "child_tokens_0" in names:
        values |= _levels_example(contract, random)
    others = (tensor for tensor in contract.inputs if tensor.name not in values)
    values |= {tensor.name: _tensor(tensor, capacity, random) for tensor in others}
    return {tensor.name: values[tensor.name] for tensor in contract.inputs}


def _sampling(contract: GraphSpec, random: np.random.Generator) -> Tensors:
    shapes = {tensor.name: tensor.shape for tensor in contract.inputs}
    vocab_size, path = shapes["logits"][2], shapes["uniforms"][1]
    assert isinstance(vocab_size, int)
    assert isinstance(path, int)
    return {
        "logits": random.normal(scale=3, size=(1, NODES, vocab_size)).astype(np.float32),
        "uniforms": random.random((1, path), np.float32),
        "temperature": np.array([0.8], np.float32),
        "top_k": np.array([random.integers(0, 50)]),
        "top_p": np.array([0.9], np.float32),
        "min_p": np.array([0.01], np.float32),
    }


def _tensor(tensor: TensorSpec, capacity: int, random: np.random.Generator) -> NDArray[Any]:
    sizes = {"B": 1, "N": NODES, "S": capacity, "R": capacity}
    shape = [sizes[axis] if isinstance(axis, str) else axis for axis in tensor.shape]
    if tensor.name == "frame_tokens":
        return np.stack([random.permutation(4 * shape[2])[: shape[2]] for _ in range(shape[1])])[None]
    if tensor.name == "frame_logprobs":
        return _log_probs(shape, random)
    if tensor.name == "blank_logprobs":
        return np.full(shape, np.log(0.25), np.float32)
    return random.random(shape, np.float32) - np.float32(0.5)


def _pass_example(contract: GraphSpec, random: np.random.Generator) -> Tensors:
    """Children of ``PASS_NODES`` nodes, for the graph ``expand``."""
    shapes = {tensor.name: tensor.shape for tensor in (*contract.inputs, *contract.outputs)}
    values: Tensors = {
        "child_tokens": random.integers(0, 99, _sized(shapes["child_tokens"])),
        "child_logprobs": _log_probs(_sized(shapes["child_logprobs"]), random),
        "frontier_scores": -np.sort(random.random((1, PASS_NODES))).astype(np.float32),
    }
    if "paths" in shapes:
        return values | {"paths": random.integers(0, 99, (1, PASS_NODES, NEXT_DEPTH))}
    reach, size = _sized(shapes["reach"]), _sized(shapes["node_features"])
    return values | {
        "depth": np.array([NEXT_DEPTH]),
        "reach": (np.arange(reach[2]) == np.arange(PASS_NODES)[:, None])[None].astype(np.int64),
        "node_features": (random.integers(-9, 9, size) * STATE_STEP).astype(np.float32),
    }


def _levels_example(contract: GraphSpec, random: np.random.Generator) -> Tensors:
    """Children of all passes, in which every frontier has the best children of the pass before."""
    values: Tensors = {}
    scores: NDArray[Any] = np.zeros((1, 1), np.float32)
    shapes = {tensor.name: tensor.shape for tensor in contract.inputs}
    depth = 0
    while f"child_tokens_{depth}" in shapes:
        children = _log_probs(_sized(shapes[f"child_tokens_{depth}"]), random)
        if depth:
            found = (scores[..., None] + values[f"child_logprobs_{depth - 1}"]).reshape(1, -1)
            # If the root has too few children, the first child fills the missing places.
            chosen = np.resize(np.argsort(-found[0]), children.shape[1])
            scores = found[:, chosen]
            values |= {f"frontier_scores_{depth}": scores, f"chosen_{depth}": chosen[None]}
        values |= {
            f"child_tokens_{depth}": random.integers(0, 99, children.shape),
            f"child_logprobs_{depth}": children,
        }
        depth += 1
    return values


def _log_probs(shape: list[int], random: np.random.Generator) -> NDArray[Any]:
    """Log-probabilities, best first; all tokens together have less than 1."""
    logits = -np.sort(random.gumbel(size=shape) * 2)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True) * 1.5), np.float32)


def _sized(shape: tuple[int | str, ...]) -> list[int]:
    sizes = {"B": 1, "W": PASS_NODES}
    return [sizes[axis] if isinstance(axis, str) else axis for axis in shape]


@torch.no_grad()
def step_reference(module: nn.Module, contract: GraphSpec, inputs: list[Tensors]) -> list[Tensors]:
    """The outputs of a module by name, for the inputs of each example."""
    past = [tensor.name for tensor in contract.inputs if tensor.name.startswith("past_")]
    expected = []
    for each in inputs:
        tensors = {name: torch.from_numpy(values) for name, values in each.items()}
        outputs = module(tensors, [tensors.pop(name) for name in past])
        named = zip((tensor.name for tensor in contract.outputs), outputs, strict=True)
        expected.append({name: value.numpy() for name, value in named})
    return expected


def check_step(graph: GraphRunner, examples: list[Tensors], reference: list[Tensors]) -> dict[str, float]:
    """The largest difference of real outputs.

    examples: inputs, as of ``random_inputs``; reference: the outputs for them
    Raises ExportError if it is too large, or if whole numbers differ. A search may order nodes of nearly the
    same probability in another way (``comparison.tree_problem``).
    """
    largest = 0.0
    for inputs, expected in zip(examples, reference, strict=True):
        for name in graph.cache:
            graph.cache[name][...] = inputs[name]
        batched = {tensor.name for tensor in graph.inputs if tensor.shape[0] == "B"}
        given = {name: each for name, each in inputs.items() if name not in graph.cache}
        found = graph.run(**{name: each[0] if name in batched else each for name, each in given.items()})
        found |= {name.replace("past_", "present_"): graph.cache[name][0] for name in graph.cache}
        if "node_log_probs" in found and found["node_log_probs"].size > 1:
            found = {name: each[None] for name, each in found.items()}
            problem = tree_problem(inputs["lengths"], found, expected)
            if problem:
                raise ExportError(f"search: differs from PyTorch, {problem}")
            largest = max(largest, probability_difference(found, expected))
            continue
        for name, values in expected.items():
            if values.dtype.kind in "ib":
                same = found[name] == values[0]
                if not same.all():
                    raise ExportError(f"{name}: differs from PyTorch, {same.mean():.0%} is equal")
                continue
            largest = max(largest, graph.difference(name, found[name], values[0]))
    return {"outputs": largest}
