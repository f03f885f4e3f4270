"""The evaluation of draft heads on held-out text: tokens per verify step, and the calibration fitted to it.

A head drafts along held-out text, at the positions where a decoder's steps would start. The calibration says
how often a draft of a given prefix probability is accepted. It has two parameters (Platt scaling;
``runtime.core.calibration`` applies it):

    acceptance probability = sigmoid(a logit(prefix probability) + b)

With a > 0 it keeps the order of a tree's nodes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from drafters.base import Drafter
from runtime.core.calibration import logit, sigmoid
from runtime.core.token_tree import TokenTree
from training.data.batches import Batch, FeatureSource, SampledBatch, all_anchors, select_layers
from training.data.sequences import Sequences
from training.head_set import FAMILY_TRAINING
from training.settings import TrainingError

# Held-out sequences of an evaluation during training, and of the last one. With more sequences an evaluation
# takes longer and the tokens per step are more exact.
NUM_EVALUATED, NUM_EVALUATED_AT_END = 32, 256
# Held-out sequences of one pass.
BATCH_SIZE = 4
# Weight of the calibration's prior, the identity, in observations. It is negligible beside a few hundred
# nodes, but keeps the optimum finite if all nodes were accepted, or none, or if the probability separates
# them.
PRIOR_WEIGHT = 1e-3
# The smallest slope a. A flatter map would lose the order of the nodes.
MIN_SLOPE = 0.01
# Newton's method ends after a step smaller than TOLERANCE, or after MAX_STEPS.
MAX_STEPS = 100
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Evaluation:
    """The result of drafting along held-out text.

    tokens_per_step: 1 + accepted drafts, averaged over the steps. A parallel head drafts trees of NUM_NODES
        nodes, an autoregressive head its one best draft.
    log_probs, accepted: the log prefix probability of every node of every tree except the roots, and whether
        the node is on the accepted path
    """

    tokens_per_step: float
    num_steps: int
    num_sequences: int
    log_probs: NDArray[np.float64]
    accepted: NDArray[np.bool_]


@torch.no_grad()
def evaluate(source: FeatureSource, head: Drafter, batches: list[SampledBatch]) -> Evaluation:
    """Draft with the runtime's own search at the positions where a decoder's steps would start.

    batches: made by ``all_anchors``; every position of the continuations is an anchor, in order
    """
    emitted, steps, sequences = 0, 0, 0
    log_probs: list[NDArray[np.float64]] = [np.zeros(0)]
    accepted: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    depth = head.config.num_frames
    for sampled in batches:
        anchors = sampled.anchors(depth, depth)
        features = source(sampled.batch)
        trees = FAMILY_TRAINING[head.config.family].trees(
            head, features, sampled, anchors.anchor_ids.flatten()
        )
        num_sequences, num_anchors = sampled.positions.shape
        sequences += num_sequences
        for sequence in range(num_sequences):
            column, count = 0, int((sampled.positions[sequence] >= 0).sum())
            while column < count:
                following = anchors.targets[sequence, column, : int(anchors.lengths[sequence, column])]
                tree = trees(sequence * num_anchors + column)
                path = accepted_path(tree, following.tolist())
                emitted += len(path)
                steps += 1
                column += len(path)
                log_probs.append(tree.log_probs[1:])
                accepted.append(np.isin(np.arange(1, len(tree)), path))
    return Evaluation(
        emitted / max(steps, 1), steps, sequences, np.concatenate(log_probs), np.concatenate(accepted)
    )


def accepted_path(tree: TokenTree, following: list[int]) -> list[int]:
    """The nodes of the longest path from the root whose tokens are the first ``following`` tokens."""
    tokens = iter([*following, -1])
    path, _ = tree.walk(lambda node: next(tokens))
    return path.tolist()


def held_out_sequences(count: int) -> str:
    """A number of sequences in words. Example: 1 -> "1 held-out sequence"."""
    return f"{count} held-out sequence{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class HeldOut:
    """The sequences that are kept from training.

    source: computes the features of the layers ``layer_ids``, which are all that any head reads
    indices: the sequences of the last evaluation
    """

    source: FeatureSource
    layer_ids: tuple[int, ...]
    sequences: Sequences
    indices: list[int]
    max_length: int
    accelerator: Accelerator

    def evaluate(self, head: Drafter, count: int = NUM_EVALUATED) -> Evaluation:
        """Evaluate a head on the first ``count`` sequences."""
        batches = [
            all_anchors(self.sequences, self.indices[start : start + BATCH_SIZE], self.max_length)
            for start in range(0, min(count, len(self.indices)), BATCH_SIZE)
        ]

        def source(batch: Batch) -> Tensor:
            return select_layers(self.source(batch), self.layer_ids, head.config.target_layer_ids)

        with self.accelerator.autocast():
            return evaluate(source, head, [batch.to(self.accelerator.device) for batch in batches])


def fit_calibration(probabilities: ArrayLike, accepted: ArrayLike) -> tuple[float, float]:
    """The (a, b) under which ``accepted`` is most likely, by logistic regression with Newton's method.

    If a higher probability does not mean more acceptances, a is MIN_SLOPE and only b is fitted. Raises
    TrainingError if there is nothing to fit.

    probabilities: [N] prefix probabilities; accepted: [N] bool
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
    """Weights [P] of a logistic regression with normal prior [P]; inputs [N, P], outcome [N], offset [N]."""

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
        # The loss is convex, so a shorter step lowers it, unless rounding hides the change.
        while (next_loss := loss(weights - step)) > best and np.abs(step).max() > TOLERANCE:
            step = step / 2
        if next_loss > best:
            break
        weights, best = weights - step, next_loss
        if np.abs(step).max() <= TOLERANCE:
            break
    return weights
