"""How well a draft's prefix probabilities foretell what is accepted; pure functions, and the diagram."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import INK, draw, looks
from runtime.core.calibration import RunningCalibration
from runtime.core.token_tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 10


@dataclass(frozen=True)
class Nodes:
    """The draft nodes of many verify steps, in the order of the steps.

    probabilities: [M] float64, prefix probability: the probability that the draft begins with the node's path
    accepted: [M] bool, whether the target model wrote that path
    sizes: [S] int64, nodes of each step
    texts: [P] int64, steps of each prompt's text
    """

    probabilities: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    texts: NDArray[np.int64]

    @property
    def measured_acceptance_length(self) -> float:
        """Tokens per step: the accepted drafts and the target model's own token."""
        return 1 + float(self.accepted.sum()) / self.sizes.size


def accepted_nodes(tree: TokenTree, continuation: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for every draft node whether the text after the root begins with its path: [N] bool.

    continuation: [L] int64, that text; a path that is longer is not accepted
    Example: drafts "a", "ab", "ac", "b", continuation "abd" -> True, True, False, False.
    """
    accepted = np.ones(len(tree), np.bool_)
    for node in range(1, len(tree)):  # a child always comes after its parent
        position = int(tree.depths[node]) - 1
        fits = position < continuation.size and tree.tokens[node] == continuation[position]
        accepted[node] = fits and accepted[tree.parents[node]]
    return accepted[1:]


def followed(nodes: Nodes, a: float, b: float) -> NDArray[np.float64]:
    """Return the running calibration's prediction for every node before its step is verified, [M]."""
    predicted = []
    ends = np.cumsum(nodes.sizes)
    starts_of_texts = {0, *np.cumsum(nodes.texts).tolist()}
    for step, (end, size) in enumerate(zip(ends, nodes.sizes, strict=True)):
        if step in starts_of_texts:
            calibration = RunningCalibration(a, b)
        predicted.append(calibration.predict(nodes.probabilities[end - size : end]))
        calibration.update(predicted[-1], np.count_nonzero(nodes.accepted[end - size : end]))
    return np.concatenate(predicted)


def reliability(probabilities: NDArray[np.float64], accepted: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Return mean probability ("psi"), share accepted and count of ten equal bins, the lowest first.

    With fewer than ten nodes, each has a bin of its own.
    Example: .1 .2, the second accepted -> (.1, 0, 1), (.2, 1, 1)
    """
    order = np.argsort(probabilities, kind="stable")
    return [
        {"psi": float(probabilities[p].mean()), "accepted": float(accepted[p].mean()), "count": int(p.size)}
        for p in np.array_split(order, min(NUM_BINS, order.size))
    ]


def describe(nodes: Nodes, probabilities: NDArray[np.float64]) -> dict[str, Any]:
    """Return reliability, expected calibration error and expected acceptance under ``probabilities`` [M].

    ece: mean over nodes of the gap between a bin's mean probability and its share accepted
    expected_beta: the acceptance length if the probabilities were right: 1 + their sum over a step's nodes,
        the mean over the steps
    """
    bins = reliability(probabilities, nodes.accepted)
    gaps = [abs(part["psi"] - part["accepted"]) * part["count"] for part in bins]
    return {
        "bins": bins,
        "ece": sum(gaps) / probabilities.size,
        "expected_beta": 1 + float(probabilities.sum()) / nodes.sizes.size,
    }


def reliability_diagram(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Draw the share accepted against the mean probability, both logarithmic, as an SVG text.

    Right probabilities lie on the diagonal. A bin of which nothing was accepted is drawn hollow at half an
    acceptance, because zero has no logarithm.
    curves: name -> bins of ``reliability``
    """
    styles = looks(list(curves))

    def fill(axes: Sequence["Axes"]) -> None:
        (axis,) = axes
        low = 1.0
        for name, bins in curves.items():
            xs = [part["psi"] for part in bins]
            shares = [part["accepted"] or 0.5 / part["count"] for part in bins]
            axis.plot(xs, shares, **{**styles[name], "marker": ""})
            for x, y, part in zip(xs, shares, bins, strict=True):
                face = styles[name]["color"] if part["accepted"] else "white"
                axis.plot(x, y, **{**styles[name], "linestyle": ""}, markerfacecolor=face)
            low = min(low, *xs, *shares)
        axis.set(xscale="log", yscale="log", xlim=(low / 1.5, 1.3), ylim=(low / 1.5, 1.3))
        axis.plot([low / 1.5, 1], [low / 1.5, 1], color=INK, linewidth=0.8, linestyle=":", zorder=0)
        axis.set_xlabel("mean prefix probability of a tenth of the nodes")
        axis.set_ylabel("share accepted")

    return draw(["Are the draft's probabilities right?"], fill, styles)
