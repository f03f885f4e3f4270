"""The seam between what is decoded and what decodes it.

A batch knows sequences, their text and their end; a step runner knows engines and caches. The batch chooses
how many draft nodes a step may verify, calls ``StepRunner.step`` and learns from its result. A runner on the
host (``runtime.decode.host_step``) and one on a device have this one surface.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.core.token_tree import TokenTree
from runtime.decode.acceptance import Acceptance
from runtime.decode.sequence import SequenceState
from runtime.engines.recorder import Recorder


@dataclass(frozen=True)
class StepResult:
    """What one step adds to B sequences.

    tokens: [B, W] int64; the first ``counts[b]`` of row b are the new tokens, of which the last is the target
        model's own and the others are accepted drafts
    counts: [B] int64, at least 1
    log_probs: those of every sequence's new tokens; empty where its ``SamplingParams`` ask for none
    node_log_probs: [B, N] float64, log of the prefix probability of every verified draft, best first; minus
        infinity where a sequence has fewer than N; N is 0 where nothing was drafted
    """

    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]
    log_probs: tuple[tuple[float, ...], ...]
    node_log_probs: NDArray[np.float64]


def step_result(trees: Sequence[TokenTree], accepted: Sequence[Acceptance]) -> StepResult:
    """The result of a step of B sequences, from the tree of each and what was accepted of it."""
    counts = np.array([acceptance.path.size for acceptance in accepted], np.int64)
    tokens = np.zeros((len(trees), counts.max()), np.int64)
    node_log_probs = np.full((len(trees), max(map(len, trees)) - 1), -np.inf)
    for index, (tree, acceptance) in enumerate(zip(trees, accepted, strict=True)):
        last = acceptance.path.size - 1
        tokens[index, :last] = tree.tokens[acceptance.path[1:]]
        tokens[index, last] = acceptance.bonus
        node_log_probs[index, : len(tree) - 1] = tree.log_probs[1:]
    return StepResult(tokens, counts, tuple(a.log_probs for a in accepted), node_log_probs)


class StepRunner(Protocol):
    """Runs prefill and decode steps. The sequence in slot b is the b-th of those that decode.

    tree_sizes: numbers of draft nodes that a step can have, 0 first; empty for any
    """

    tree_sizes: Sequence[int]
    max_num_seqs: int
    prefill_chunk_size: int
    recorder: Recorder

    def prefill(self, slot: int, sequence: SequenceState, num_tokens: int) -> StepResult | None:
        """Read the next ``num_tokens`` of a prompt, at most ``prefill_chunk_size``, into a slot.

        Returns the sequence's first token once the whole prompt has been read.
        """
        ...

    def step(self, sequences: Sequence[SequenceState], num_nodes: int) -> StepResult:
        """Draft up to ``num_nodes`` nodes for each sequence, verify them, accept and commit.

        The sequences are those of the first slots, in order. Without nodes this is a step of plain decoding.
        """
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Give a sequence with ``length`` cached tokens another slot; its old one is free afterwards."""
        ...

    def release(self, slot: int) -> None:
        """Free a slot."""
        ...

    def close(self) -> None:
        """Give back a device's memory; nothing else may be called afterwards. A second call does nothing."""
        ...
