"""Random inputs of the weightless graphs of autoregressive heads (``export.step.level_modules``)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.verify.graph_runner import Tensors
from runtime.core.bundle import GraphSpec

# Nodes of the pass before, and depth of the next one's.
NODES, DEPTH = 2, 2
# States are multiples of this, which every precision has.
STATE_STEP = 1 / 8


def pass_example(contract: GraphSpec, random: np.random.Generator) -> Tensors:
    """Children of ``NODES`` nodes, for the graph ``expand``."""
    shapes = {tensor.name: tensor.shape for tensor in (*contract.inputs, *contract.outputs)}
    values: Tensors = {
        "child_tokens": random.integers(0, 99, _sized(shapes["child_tokens"])),
        "child_logprobs": _log_probs(_sized(shapes["child_logprobs"]), random),
        "frontier_scores": -np.sort(random.random((1, NODES))).astype(np.float32),
    }
    if "paths" in shapes:
        return values | {"paths": random.integers(0, 99, (1, NODES, DEPTH))}
    reach, size = _sized(shapes["reach"]), _sized(shapes["node_features"])
    return values | {
        "depth": np.array([DEPTH]),
        "reach": (np.arange(reach[2]) == np.arange(NODES)[:, None])[None].astype(np.int64),
        "node_features": (random.integers(-9, 9, size) * STATE_STEP).astype(np.float32),
    }


def levels_example(contract: GraphSpec, random: np.random.Generator) -> Tensors:
    """Children of all passes, in which every frontier has the best children of the pass before."""
    values: Tensors = {}
    scores: NDArray[Any] = np.zeros((1, 1), np.float32)
    shapes = {tensor.name: tensor.shape for tensor in contract.inputs}
    depth = 0
    while f"child_tokens_{depth}" in shapes:
        children = _log_probs(_sized(shapes[f"child_tokens_{depth}"]), random)
        if depth:
            found = (scores[..., None] + values[f"child_logprobs_{depth - 1}"]).reshape(1, -1)
            # Where the root has too few children, the first stands for what does not exist.
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
    sizes = {"B": 1, "W": NODES}
    return [sizes[axis] if isinstance(axis, str) else axis for axis in shape]
