"""Compare the outputs of a graph or an engine with a reference: equal, or as close as rounding allows.

The build's check of graphs and engines against PyTorch uses this module, and so does the check of a device's
engines against the engines of a CPU (``benchmarks.gpu``): one set of tolerances and rules.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from export.errors import ExportError

Tensors = dict[str, NDArray[Any]]

# Largest difference accepted by the type of the activations, relative to the largest reference value. Float32
# sums in another order differ by a few 1e-6, results of a wrong mask or position by more than any of these.
# Activations that are rounded to int8 may get the next code for such a difference. "int8 alone": those of the
# reference are not rounded.
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "int8": 1e-1, "int8 alone": 2e-1}
# Share of the labels that may differ, by the type of the activations.
DIFFERENT_LABELS = {"float32": 0.05, "float16": 0.25, "bfloat16": 0.6, "int8": 0.6, "int8 alone": 0.6}
# Tokens that a graph ranks, by the tensor that ranks them. Tokens of nearly the same rank may change places.
RANKED = {"frame_tokens": "frame_logprobs", "child_tokens": "child_logprobs"}
# Largest difference of the probabilities of a search's nodes. A GPU's products have ten bits behind the
# point, and the search adds a dozen of them up.
PROBABILITY_TOLERANCE = 2e-2


def check_difference(
    what: str, found: NDArray[Any], expected: NDArray[Any], activations: str, *, slack: float = 1.0
) -> float:
    """The largest absolute difference. Raises ExportError if it is larger than rounding explains.

    activations: the type that the graph computes in; slack: by how much rounding may grow on the way
    """
    difference, scale = _largest_difference(found, expected)
    limit = slack * TOLERANCES[activations] * scale
    if not difference <= limit:  # NaN fails too
        raise ExportError(f"{what}: the graph differs from PyTorch by {difference:.2e}, accepted {limit:.0e}")
    return difference


def check_labels(
    what: str, found: NDArray[Any], expected: NDArray[Any], activations: str
) -> NDArray[np.bool_]:
    """Which labels both sides have in the same places.

    Labels of nearly equal probability may change places. Raises ExportError if too many differ.
    """
    same = found == expected
    differ = same.size - same.sum()
    if differ > same.size * DIFFERENT_LABELS[activations]:
        raise ExportError(f"{what}: {differ} differ from PyTorch's")
    return same


def of_labels(array: NDArray[Any], same: NDArray[np.bool_]) -> NDArray[Any]:
    """Vectors of the labels that both sides have: of [..., K, r] those where ``same`` [..., K] is True.

    The blank's vectors, which [..., K + 1, r] has too, are always kept. Arrays of other shapes are unchanged.
    """
    if array.ndim != same.ndim + 1 or array.shape[:-2] != same.shape[:-1]:
        return array
    blanks = np.ones((*same.shape[:-1], array.shape[-2] - same.shape[-1]), np.bool_)
    return array[np.concatenate((same, blanks), axis=-1)]


def float_difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference, relative to the largest expected value or 1; infinity if only one is finite."""
    if not expected.size:
        return 0.0
    is_finite = np.isfinite(expected)
    # Minus infinity is the logarithm of 0, which both have to have in the same places.
    if not np.array_equal(found[~is_finite], expected[~is_finite], equal_nan=True):
        return float("inf")
    if not is_finite.any():
        return 0.0
    difference, scale = _largest_difference(found[is_finite], expected[is_finite])
    return difference / scale if np.isfinite(difference) else float("inf")


def _largest_difference(found: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """The largest absolute difference, and the largest expected value or 1, to which it is relative."""
    difference = np.abs(np.subtract(found, expected, dtype=np.float64)).max()
    return float(difference), max(1.0, float(np.abs(expected).max()))


def compare(
    graph: str, inputs: Mapping[str, NDArray[Any]], found: Tensors, expected: Tensors, tolerance: float
) -> tuple[float, list[str]]:
    """The largest relative difference of floats, and the problems, one line for each tensor that has one.

    tolerance: of floats that the graph computes; whole numbers have to be equal unless they depend on the
        order of values that rounding may exchange
    """
    if graph.startswith("search_") and found["parents"].shape[1] > 1:
        problem = tree_problem(inputs["lengths"], found, expected)
        probabilities = (np.exp(np.sort(each["node_log_probs"])) for each in (found, expected))
        return float_difference(*probabilities), [problem] if problem else []
    worst, problems = 0.0, []
    labels = "frame_tokens"
    same = found[labels] == expected[labels] if labels in expected else None
    for name, wanted in expected.items():
        values = found[name]
        if wanted.dtype.kind in "ib":
            problem = _whole_numbers_problem(name, found, expected, tolerance)
            if problem:
                problems.append(f"{name}: {problem}")
            continue
        if same is not None:
            values, wanted = of_labels(values, same), of_labels(wanted, same)
        difference = float_difference(values, wanted)
        worst = max(worst, difference)
        if not difference <= tolerance:
            problems.append(f"{name}: differs by {difference:.2e}, {tolerance:g} is allowed")
    return worst, problems


def _whole_numbers_problem(name: str, found: Tensors, expected: Tensors, tolerance: float) -> str | None:
    differ = found[name] != expected[name]
    if not differ.any():
        return None
    if name == "next_tokens" and "logits" in expected:
        gaps = _gaps_of_choices(found[name], expected["logits"])
    elif name in RANKED:
        gaps = _gaps_of_ranks(found[name], expected[name], expected[RANKED[name]])
    else:
        return f"{differ.sum()} of {differ.size} differ"
    # Both values may be off by the tolerance.
    worst = float(gaps[differ].max())
    if worst <= 2 * tolerance:
        return None
    return f"{differ.sum()} of {differ.size} differ, by {worst:.2e} of the values that they are ranked by"


def _gaps_of_choices(tokens: NDArray[Any], logits: NDArray[Any]) -> NDArray[np.float64]:
    """How far the logits of these tokens are below the best, relative to the largest logit."""
    known = np.clip(tokens, 0, logits.shape[-1] - 1)
    chosen = np.take_along_axis(logits, known[..., None], -1)[..., 0]
    gaps = (logits.max(-1) - chosen) / max(1.0, float(np.abs(logits).max()))
    return np.where(tokens == known, gaps, np.inf)


def _gaps_of_ranks(tokens: NDArray[Any], expected: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float64]:
    """How far the values of tokens are from those of the places where they stand, relative to the largest.

    A token that is not expected at all has at most the smallest of the values.
    """
    matches = tokens[..., :, None] == expected[..., None, :]
    own = np.where(matches, values[..., None, :], -np.inf).max(-1)
    own = np.where(matches.any(-1), own, values.min(-1, keepdims=True))
    finite = values[np.isfinite(values)]
    scale = max(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    return np.asarray(np.abs(own - values) / scale, np.float64)


def tree_problem(lengths: NDArray[Any], found: Tensors, expected: Tensors) -> str | None:
    """The first problem of a search's trees; None if there is none.

    Nodes of nearly the same probability may change places, or be left out for one another. Whatever the
    order, each node has to follow its parent, and mask and positions have to be those of the tree.
    """
    if all(np.array_equal(found[name], expected[name]) for name in expected if name != "node_log_probs"):
        difference = probability_difference(found, expected)
        return None if difference <= PROBABILITY_TOLERANCE else f"node_log_probs: differ by {difference:.2e}"
    for row, length in enumerate(lengths.tolist()):
        tree, wanted = ({name: each[row] for name, each in side.items()} for side in (found, expected))
        problem = _structure_problem(tree, length) or _nodes_problem(tree, wanted)
        if problem:
            return f"tree {row}: {problem}"
    return None


def probability_difference(found: Tensors, expected: Tensors) -> float:
    """The largest difference of the probabilities of nodes in the same places."""
    return float(np.abs(np.exp(found["node_log_probs"]) - np.exp(expected["node_log_probs"])).max())


def _structure_problem(tree: Tensors, length: int) -> str | None:
    parents = tree["parents"]
    size = parents.size
    # A place that no node fills has no parent.
    has_parent = (parents >= 0) | np.isneginf(tree["node_log_probs"])
    if not (has_parent & (parents < np.arange(size)))[1:].all():
        return "a node comes before its parent"
    ancestors = np.eye(size, dtype=np.bool_)
    for node in np.flatnonzero(parents >= 0):
        ancestors[node] |= ancestors[parents[node]]
    if not np.array_equal(tree["ancestors"], ancestors):
        return "ancestors are not those of the parents"
    depths = ancestors.sum(1) - 1
    if not np.array_equal(tree["depths"], depths):
        return "depths are not those of the parents"
    if not np.array_equal(tree["position_ids"], length + depths):
        return "positions are not those of the depths"
    mask = np.zeros_like(tree["attn_mask"])
    mask[..., :length] = True
    mask[..., length : length + size] = ancestors
    return None if np.array_equal(tree["attn_mask"], mask) else "the mask is not that of the tree"


def _nodes_problem(tree: Tensors, wanted: Tensors) -> str | None:
    """Compares the probabilities of the nodes, each known by the tokens from the root to it."""
    here, there = _probabilities(tree), _probabilities(wanted)
    for nodes, others in ((here, there), (there, here)):
        # A node that the other tree lacks is at most as probable as the least that it took.
        least = min(others.values())
        for path, probability in nodes.items():
            off = abs(probability - others[path]) if path in others else probability - least
            if off > PROBABILITY_TOLERANCE:
                return f"the path {path} has probability {probability:.3f} in one, not in the other"
    return None


def _probabilities(tree: Tensors) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    found: dict[tuple[int, ...], float] = {}
    for token, parent, log_prob in zip(
        tree["input_ids"].tolist(), tree["parents"].tolist(), tree["node_log_probs"].tolist(), strict=True
    ):
        path = (*(paths[parent] if paths else ()), token)
        paths.append(path)
        # Places that no node fills have probability 0, and may repeat the tokens of others.
        found[path] = max(found.get(path, 0.0), float(np.exp(log_prob)))
    return found
