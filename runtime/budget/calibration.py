"""From the probability a draft head states to the share that is accepted: psi' = sigmoid(a logit(psi) + b).

Two parameters (Platt scaling), fitted when the head is trained; while a text is decoded b follows what is
accepted of it. With a > 0 the map keeps the order of the nodes, so a parent still scores at least as high
as its child and a calibrated tree is the same tree.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Probabilities are kept this far from 0 and 1, where their logits end.
EDGE = 1e-9
# While decoding: the weight of a verify step in the next one's memory, how much evidence (in units of
# the loss's curvature) the fitted b counts for, and the longest step of b.
MEMORY = 0.9
FITTED_WEIGHT = 0.5
MAX_SHIFT = 2.0


def calibrate(psi: ArrayLike, a: float, b: float) -> NDArray[np.float64]:
    """Calibrated probabilities, of any shape. Example: a = 2, b = 0 takes 0.2 to 1/17."""
    return sigmoid(a * logit(psi) + b)


class RunningCalibration:
    """The calibration of one text: begins as (a, b), then b follows the text.

    A head is surer of some texts than it says, and less sure of others: code that repeats itself, a kind
    of question it was not trained on. Each verify step is one Newton step on b of the logistic loss.
    """

    def __init__(self, a: float, b: float):
        self.a, self.b = a, b
        self._weight = FITTED_WEIGHT

    def predict(self, psi: ArrayLike) -> NDArray[np.float64]:
        """Calibrated probabilities, of any shape."""
        return calibrate(psi, self.a, self.b)

    def update(self, predicted: NDArray[np.float64], num_accepted: int) -> None:
        """predicted [N]: what ``predict`` said of the nodes of a step; how many of them were accepted."""
        curvature = float((predicted * (1 - predicted)).sum())
        self._weight = MEMORY * self._weight + (1 - MEMORY) * FITTED_WEIGHT + curvature
        shift = (num_accepted - float(predicted.sum())) / self._weight
        self.b += min(MAX_SHIFT, max(-MAX_SHIFT, shift))


def logit(psi: ArrayLike) -> NDArray[np.float64]:
    """Of probabilities, of any shape; those at 0 and 1 are moved inside by ``EDGE``."""
    inside = np.clip(np.asarray(psi, np.float64), EDGE, 1 - EDGE)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-np.logaddexp(0, -logits))
