"""From the probability a draft head states to the share that is accepted: psi' = sigmoid(a logit(psi) + b).

Two parameters (Platt scaling), fitted when the head is trained; while a text is decoded b follows what is
accepted of it. With a > 0 the map keeps the order of the nodes, so a parent still scores at least as high
as its child and a calibrated tree is the same tree.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.errors import UserError

# Probabilities are kept this far from 0 and 1, where their logits end.
EDGE = 1e-9
# Pull towards the identity, in observations: nothing beside a few hundred nodes, but it keeps the
# optimum finite where every node was accepted, or none, or psi separates them.
PRIOR_WEIGHT = 1e-3
# The flattest map there is; it still keeps the nodes' order.
MIN_SLOPE = 0.01
MAX_STEPS = 100
TOLERANCE = 1e-10
# While decoding: the weight of a verify step in the next one's memory, how much evidence (in units of
# the loss's curvature) the fitted b counts for, and the longest step of b.
MEMORY = 0.9
FITTED_WEIGHT = 0.5
MAX_SHIFT = 2.0


def calibrate(psi: ArrayLike, a: float, b: float) -> NDArray[np.float64]:
    """Calibrated probabilities, of any shape. Example: a = 2, b = 0 takes 0.2 to 1/17."""
    return _sigmoid(a * _logit(psi) + b)


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


def fit_calibration(psi: ArrayLike, accepted: ArrayLike) -> tuple[float, float]:
    """The (a, b) under which ``accepted`` is most likely: logistic regression on logit(psi), by Newton.

    psi: [N] probabilities; accepted: [N] bool
    Where a higher psi does not mean more acceptances, a is MIN_SLOPE and b alone is fitted.
    Raises UserError when there is nothing to fit.
    """
    outcome = np.asarray(accepted, np.float64)
    if outcome.ndim != 1 or not outcome.size or outcome.shape != np.shape(psi):
        raise UserError(
            f"calibration: psi and accepted must be two lists of one length, not empty; got shapes "
            f"{np.shape(psi)} and {outcome.shape}"
        )
    logits = _logit(psi)
    ones = np.ones_like(logits)
    a, b = _regress(np.column_stack([logits, ones]), outcome, np.zeros_like(logits), np.array([1.0, 0.0]))
    if a < MIN_SLOPE:
        # The loss is convex, so the best pair with a >= MIN_SLOPE has a = MIN_SLOPE.
        a = MIN_SLOPE
        (b,) = _regress(ones[:, None], outcome, a * logits, np.zeros(1))
    return float(a), float(b)


def _regress(
    inputs: NDArray[np.float64],
    outcome: NDArray[np.float64],
    offset: NDArray[np.float64],
    prior: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Weights [P] of a logistic regression, pulled towards ``prior``; inputs [N, P], the others [N]."""

    def loss(weights: NDArray[np.float64]) -> float:
        logits = inputs @ weights + offset
        pull = PRIOR_WEIGHT / 2 * np.square(weights - prior).sum()
        return float((np.logaddexp(0, logits) - outcome * logits).sum() + pull)

    weights, best = prior, loss(prior)
    for _ in range(MAX_STEPS):
        predicted = _sigmoid(inputs @ weights + offset)
        gradient = inputs.T @ (predicted - outcome) + PRIOR_WEIGHT * (weights - prior)
        curvature = (inputs.T * (predicted * (1 - predicted))) @ inputs + PRIOR_WEIGHT * np.eye(prior.size)
        step = np.linalg.solve(curvature, gradient)
        # The loss is convex: a shorter step lowers it, until rounding hides that.
        while (found := loss(weights - step)) > best and np.abs(step).max() > TOLERANCE:
            step = step / 2
        if found > best:
            break
        weights, best = weights - step, found
        if np.abs(step).max() <= TOLERANCE:
            break
    return weights


def _logit(psi: ArrayLike) -> NDArray[np.float64]:
    inside = np.clip(np.asarray(psi, np.float64), EDGE, 1 - EDGE)
    return np.log(inside) - np.log1p(-inside)


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-np.logaddexp(0, -logits))
