"""How well a draft's probabilities foretell what is accepted; pure functions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.budget.calibration import RunningCalibration
from runtime.trees.token_tree import TokenTree

NUM_BINS = 10


@dataclass(frozen=True)
class Nodes:
    """The draft nodes of many verify steps, step after step.

    psi: [M] float64, the probability the draft gives to the node's path
    accepted: [M] bool, whether the backbone wrote that path
    sizes: [S] int64, nodes of each step
    texts: [P] int64, steps of each prompt's text
    """

    psi: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    texts: NDArray[np.int64]


def accepted_nodes(tree: TokenTree, continuation: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which drafts of a tree are a beginning of the text that followed its anchor: [N] bool.

    continuation: [L] int64. A draft that is longer than it is not accepted.
    Example: drafts "a", "ab", "ac", "b", continuation "abd" -> True, True, False, False.
    """
    accepted = np.ones(len(tree), np.bool_)
    for node in range(1, len(tree)):  # a child always comes after its parent
        place = int(tree.depths[node]) - 1
        accepted[node] = (
            accepted[tree.parents[node]]
            and place < continuation.size
            and tree.tokens[node] == continuation[place]
        )
    return accepted[1:]


def followed(nodes: Nodes, a: float, b: float) -> NDArray[np.float64]:
    """[M]: what the decoder's running calibration says of every node before the step is verified."""
    predicted = []
    ends = np.cumsum(nodes.sizes)
    step = 0
    for count in nodes.texts:
        calibration = RunningCalibration(a, b)
        for end, size in zip(ends[step : step + count], nodes.sizes[step : step + count], strict=True):
            predicted.append(calibration.predict(nodes.psi[end - size : end]))
            calibration.update(predicted[-1], np.count_nonzero(nodes.accepted[end - size : end]))
        step += count
    return np.concatenate(predicted)


def reliability(psi: NDArray[np.float64], accepted: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Mean psi, share accepted and count in ten bins of equal count, lowest psi first.

    Fewer than ten nodes fill as many bins. Example: psi .1 .2, the second accepted -> (.1, 0, 1), (.2, 1, 1).
    """
    order = np.argsort(psi, kind="stable")
    return [
        {
            "psi": float(psi[part].mean()),
            "accepted": float(accepted[part].mean()),
            "count": int(part.size),
        }
        for part in np.array_split(order, min(NUM_BINS, order.size))
    ]


def describe(nodes: Nodes, psi: NDArray[np.float64]) -> dict[str, Any]:
    """Reliability, expected calibration error and expected acceptance under probabilities ``psi`` [M].

    ece: mean over nodes of the gap between a bin's mean psi and its share accepted
    expected_beta: 1 + sum over a step's nodes of psi, mean over the steps: tokens per step if psi were right
    """
    bins = reliability(psi, nodes.accepted)
    gaps = [abs(part["psi"] - part["accepted"]) * part["count"] for part in bins]
    return {
        "bins": bins,
        "ece": sum(gaps) / psi.size,
        "expected_beta": 1 + float(psi.sum()) / nodes.sizes.size,
    }


def measured_beta(nodes: Nodes) -> float:
    """Tokens per step over the same steps: the accepted drafts and the backbone's own token."""
    return 1 + float(nodes.accepted.sum()) / nodes.sizes.size
