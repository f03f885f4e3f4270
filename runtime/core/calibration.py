"""From the prefix probability of a node to the probability that it is accepted.

The acceptance probability is psi' = sigmoid(a logit(psi) + b) (Platt scaling). The two parameters are fitted
when the head is trained; while texts are decoded, b follows what is accepted. With a > 0 the map keeps the
order of the nodes, so a parent still scores at least as high as its child and a calibrated tree is the same
tree.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

# Probabilities are kept this far from 0 and 1, where their logits are infinite.
EDGE = 1e-9
# While decoding: the weight of the past in the next step's evidence, how much evidence (in units of the
# loss's curvature) the fitted b counts for, and the longest step of b. Where a head is too sure of its best
# nodes only, as SmolLM2's is in code, b would lower the others too: with 4 units steps verified too few.
MEMORY = 0.95
FITTED_WEIGHT = 16.0
MAX_SHIFT = 2.0
# For compiled functions: a calibration's a and b, and the weight of its evidence.
RUNNING = np.dtype([("a", np.float64), ("b", np.float64), ("weight", np.float64)])


def calibrate(prefix_probs: ArrayLike, a: float, b: float) -> NDArray[np.float64]:
    """Acceptance probabilities, of any shape. Example: a = 2, b = 0 takes 0.2 to 1/17."""
    return sigmoid(a * logit(prefix_probs) + b)


def logit(probs: ArrayLike) -> NDArray[np.float64]:
    inside = np.clip(np.asarray(probs, np.float64), EDGE, 1 - EDGE)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-np.logaddexp(0, -logits))


# Compiled, because every step calls it for a few numbers, which takes numpy ten calls.
@njit(cache=True)
def calibrate_logs(running: Any, log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """``calibrate`` by a ``RUNNING``, for logarithms of prefix probabilities [B, N]."""
    found = np.empty(log_probs.shape)
    for row in range(log_probs.shape[0]):
        for index in range(log_probs.shape[1]):
            prob = min(max(np.exp(log_probs[row, index]), EDGE), 1 - EDGE)
            x = running["a"] * (np.log(prob) - np.log1p(-prob)) + running["b"]
            found[row, index] = 1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x))
    return found


@njit(cache=True)
def follow_accepted(running: Any, predicted: NDArray[np.float64], num_accepted: int) -> None:
    """Let a ``RUNNING`` follow a step: one Newton step on b of the logistic loss.

    predicted: [M], the acceptance probabilities of the step's nodes, of which so many were accepted
    """
    expected = curvature = 0.0
    for probability in predicted:
        expected += probability
        curvature += probability * (1 - probability)
    running["weight"] = MEMORY * running["weight"] + (1 - MEMORY) * FITTED_WEIGHT + curvature
    running["b"] += min(MAX_SHIFT, max(-MAX_SHIFT, (num_accepted - expected) / running["weight"]))


class RunningCalibration:
    """A calibration that begins as (a, b); then b follows what is decoded.

    A head underestimates some texts and overestimates others: code that repeats itself, a kind of question it
    was not trained on.

    state: ``RUNNING`` [1]
    """

    def __init__(self, a: float, b: float):
        self.state = np.array([(a, b, FITTED_WEIGHT)], RUNNING)

    @property
    def b(self) -> float:
        return float(self.state["b"][0])

    def predict(self, prefix_probs: ArrayLike) -> NDArray[np.float64]:
        return calibrate(prefix_probs, float(self.state["a"][0]), self.b)

    def update(self, predicted: NDArray[np.float64], num_accepted: int) -> None:
        follow_accepted(self.state[0], predicted, num_accepted)
