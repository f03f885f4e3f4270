"""Acceptance: the longest path of a tree that the target model itself would have written.

The text never depends on what was proposed. ``GreedyAcceptor`` follows the target model's most probable
tokens; ``runtime.decode.sampling.Sampler`` draws them.

Scores say how probable the target model finds tokens, and which ones it finds most probable in their place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree


@dataclass(frozen=True)
class TokenScore:
    """The model's own opinion of a token, at temperature 1 and without filters.

    top: the most probable tokens in its place with their log-probabilities, best first
    """

    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits: NDArray[np.float32], tokens: Sequence[int], num_top: int) -> list[TokenScore]:
    """The scores of tokens [N] that follow the positions of ``logits`` [N, V]."""
    scores = []
    for row, token in zip(logits, tokens, strict=True):
        shifted = row.astype(np.float64) - row.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        top = [(int(best), float(log_probs[best])) for best in _best(row, num_top)]
        scores.append(TokenScore(float(log_probs[token]), tuple(top)))
    return scores


def _best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ``count`` most probable tokens, best first; of equal ones, those that the vocabulary has first."""
    if not count:
        return np.empty(0, np.int64)
    least = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= least)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


@dataclass(frozen=True)
class Acceptance:
    """What a verified tree adds to its sequence.

    path: [A] int64 node indices from the root (always 0) to the last accepted node
    bonus: the target model's own token after that node, the root of the next tree
    scores: of the A new tokens (the path's after the root, and the bonus); empty where not asked for
    """

    path: NDArray[np.int64]
    bonus: int
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class GraphSampling:
    """How a graph on a device draws a sequence's tokens; the numbers are as in ``SamplingParams``.

    log_probs: whether the tokens' log-probabilities are wanted
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    log_probs: bool = False


class Acceptor(Protocol):
    """Chooses the tokens of one sequence, tree after tree.

    needs_logits: whether ``accept`` reads logits
    graph_sampling: how a graph on a device may choose them instead; None where only ``accept`` can
    """

    needs_logits: bool
    graph_sampling: GraphSampling | None

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        """Write the numbers [P] that the next tokens are drawn with."""
        ...

    def advance(self, count: int) -> None:
        """A graph has chosen the next ``count`` tokens."""
        ...

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        """Accept a path of the tree and choose the token after it.

        next_tokens: [M] int64, the target model's most probable token after every node; M is at least the
            tree's N + 1 nodes, and the rest is padding
        logits: [M, V]; may be None where ``needs_logits`` is false
        """
        ...


class GreedyAcceptor:
    """Takes the target model's most probable tokens.

    Exact: the accepted tokens and the bonus are those of plain greedy decoding.
    """

    needs_logits = False
    graph_sampling: GraphSampling | None = GraphSampling()

    def fill_uniforms(self, numbers: NDArray[np.float32]) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def accept(
        self, tree: TokenTree, next_tokens: NDArray[np.int64], logits: NDArray[np.float32] | None
    ) -> Acceptance:
        return Acceptance(*tree.walk(next_tokens.item))
