"""Fits a head's calibration: how often a draft of a given prefix probability is accepted.

The map has two parameters (Platt scaling; ``runtime.core.calibration`` applies it):

    acceptance probability = sigmoid(a logit(prefix probability) + b)

With a > 0 it keeps the order of a tree's nodes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from runtime.core.calibration import logit, sigmoid
from training.errors import TrainingError

# Pull towards the identity, in observations. It is nothing beside a few hundred nodes, but keeps the
# optimum finite where all nodes were accepted, or none, or the probability separates them.
PRIOR_WEIGHT = 1e-3
# The smallest a: the flattest map that still keeps the nodes' order.
MIN_SLOPE = 0.01
# Newton's method ends after a step below TOLERANCE, at the latest after MAX_STEPS.
MAX_STEPS = 100
TOLERANCE = 1e-10


def fit_calibration(probabilities: ArrayLike, accepted: ArrayLike) -> tuple[float, float]:
    """The (a, b) under which ``accepted`` is most likely: logistic regression, by Newton's method.

    probabilities: [N] prefix probabilities; accepted: [N] bool
    Where a higher probability does not mean more acceptances, a is MIN_SLOPE and b alone is fitted.
    Raises TrainingError when there is nothing to fit.
    """
    outcome = np.asarray(accepted, np.float64)
    if outcome.ndim != 1 or not outcome.size or outcome.shape != np.shape(probabilities):
        raise TrainingError(
            "calibration: probabilities and accepted must be two lists of one length, not empty; got shapes "
            f"{np.shape(probabilities)} and {outcome.shape}"
        )
    logits = logit(probabilities)
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
        predicted = sigmoid(inputs @ weights + offset)
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
